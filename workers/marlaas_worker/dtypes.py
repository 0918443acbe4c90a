"""Number formats of a pool's weights: an engine and its trainer choose the same, each on its own hardware. Knows no torch."""


def choose_dtype(wanted: str, gpu: bool) -> str:
    """Resolve `auto`: bfloat16 on a GPU; float32 on a CPU, where it is as fast and agrees with the trainer to 1e-6 (bench/rollout_engine.py)."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if gpu else "float32"

"""Dtypes of a pool's weights.

An engine and its trainer resolve `auto` to the same dtype, each on its own hardware. Does not import torch.
"""


def choose_dtype(wanted: str, gpu: bool) -> str:
    """Resolve `auto`: bfloat16 on a GPU, float32 on a CPU.

    On a CPU, float32 is as fast and agrees with the trainer to 1e-6 (bench/rollout_engine.py).
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if gpu else "float32"

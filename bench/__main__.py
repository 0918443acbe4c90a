"""`python -m bench [NAME…]`: take all measurements, or those named; `python -m bench NAME --OPTION…`: one, with its own options."""

import importlib
import sys

NAMES = (
    "bus",
    "operator_scale",
    "orchestrator_queue",
    "sandbox",
    "trainer",
    "compiled",
    "rollout_service",
    "busy",
    "learning",
    "algorithms",
    "arithmetic",
    "trl_step",
    "trl",
)


def main() -> None:
    words = sys.argv[1:]
    if len(words) > 1 and words[1].startswith("-"):
        importlib.import_module(f"bench.{words[0]}").main(words[1:])
        return
    for name in words or NAMES:
        print(f"\n## {name}\n", flush=True)
        module = importlib.import_module(f"bench.{name}")
        print((module.__doc__ or "").strip(), end="\n\n", flush=True)
        module.main()


if __name__ == "__main__":
    main()

"""`python -m bench [NAME…]`: take all measurements, or those named."""

import importlib
import sys

NAMES = ("bus", "sandbox", "trainer", "rollout_service", "busy", "learning", "arithmetic")


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        print(f"\n## {name}\n", flush=True)
        module = importlib.import_module(f"bench.{name}")
        print((module.__doc__ or "").strip(), end="\n\n", flush=True)
        module.main()


if __name__ == "__main__":
    main()

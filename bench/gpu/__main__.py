"""Run one of the measurements for a GPU; small shapes run on a CPU."""

import importlib
import sys
from collections.abc import Sequence

NAMES = ("operations", "trainer", "trees", "ceiling", "noise", "engine", "loop", "all")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in NAMES:
        sys.exit(f"usage: python -m bench.gpu NAME [--help], where NAME is {', '.join(NAMES)}")
    importlib.import_module(f"bench.gpu.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    main()

"""Run one of the measurements for a GPU; small shapes run on a CPU."""

import importlib
import sys
from collections.abc import Sequence

NAMES = ("trainer", "ceiling", "noise", "engine", "loop")


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] not in NAMES:
        sys.exit(f"usage: python -m bench.gpu NAME [--help], where NAME is {', '.join(NAMES)}")
    importlib.import_module(f"bench.gpu.{words[0]}").main(words[1:])


if __name__ == "__main__":
    main()

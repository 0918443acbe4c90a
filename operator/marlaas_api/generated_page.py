"""Command line of a generated page: write the file, or with --check compare it with the committed one."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def write_or_check(module: str, page: Callable[[], str], arguments: Sequence[str] | None) -> int:
    """Run `python -m MODULE [--check] FILE`; return 0 on success, 1 if the file is stale."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Generate a page of docs/.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    options = parser.parse_args(arguments)
    if not options.check:
        options.file.write_text(page(), encoding="utf-8")
        return 0
    if options.file.is_file() and options.file.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{options.file} is stale, it is not what {module} gives: run `make crds`\n")
    return 1

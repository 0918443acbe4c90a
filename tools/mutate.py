"""Mutation testing by hand-picked mutations: which one-line mistakes in the product make a test fail.

`tools/mutations/AREA.toml` lists the mutations of an area. Each one replaces a text that occurs once in a file, and names
the tests that are relevant to it:

    [[mutation]]
    name = "group mean over all groups"
    file = "workers/marlaas_worker/rl/advantages.py"
    old = "rewards_G.mean(axis=-1)"
    new = "rewards_G.mean()"
    tests = ["tests/rl"]

The files are changed in place, one at a time, and restored afterwards. Run this in a checkout of its own.

    python -m tools.mutate                     every area
    python -m tools.mutate rl trainer          two areas
    python -m tools.mutate rl -k "group mean"  the mutations whose name contains a text
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tools" / "mutations"
NOT_RUN = {3, 4, 5}
"""Exit statuses of pytest: an internal error, a wrong argument, and no test collected."""


class BadMutation(Exception):
    """A mutation does not fit the sources or the tests."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake: `old`, which occurs once in `file`, becomes `new`; `tests` are pytest's arguments."""

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """Return the source with the mistake.

        Raises:
            BadMutation: the text does not occur exactly once, or the mutation changes nothing.
        """
        if (count := source.count(self.old)) != 1 or self.old == self.new:
            raise BadMutation(f"{self.area}: {self.name}: its text occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)


def read(area: str) -> list[Mutation]:
    """The mutations of an area, in the order of its file."""
    with (FOLDER / f"{area}.toml").open("rb") as file:
        rows = tomllib.load(file)["mutation"]
    return [Mutation(area=area, **row | {"tests": tuple(row["tests"])}) for row in rows]


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Change the file of a mutation, and restore it at the end, also after Ctrl-C or SIGTERM."""
    path = ROOT / mutation.file
    before = path.read_text()
    after = mutation.apply(before)
    _write(path, after)
    try:
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    """Write a source file with a modification time of its own: Python compares it in seconds with the cached bytecode's."""
    last = path.stat().st_mtime
    path.write_text(text)
    at = max(time.time(), last + 2)
    os.utime(path, (at, at))


def is_caught(mutation: Mutation) -> bool:
    """Run the relevant tests; true if one of them fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *mutation.tests]
    once = os.environ | {"MARLAAS_TESTS_ALONE": "1"}  # the guard of flaky tests would repeat a test that catches
    done = subprocess.run(command, cwd=ROOT, env=once, capture_output=True, text=True, check=False)
    if done.returncode in NOT_RUN:
        raise BadMutation(f"{mutation.area}: {mutation.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def main() -> int:
    """Print a line for each mutation and a sum for each area; the exit status is 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    areas = sorted(path.stem for path in FOLDER.glob("*.toml"))
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"default: all of {', '.join(areas)}")
    parser.add_argument("-k", dest="text", default="", help="only mutations whose name contains this text")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [one for area in arguments.areas or areas for one in read(area) if arguments.text in one.name]
    for mutation in chosen:
        mutation.apply((ROOT / mutation.file).read_text())
    missed = 0
    for mutation in chosen:
        begun = time.monotonic()
        with applied(mutation):
            caught = is_caught(mutation)
        missed += not caught
        word = "caught" if caught else "MISSED"
        print(f"{word}  {time.monotonic() - begun:6.1f} s  {mutation.area}: {mutation.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

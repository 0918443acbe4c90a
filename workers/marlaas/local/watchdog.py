"""`python -m marlaas.local.watchdog FOLDER`: kills the processes that a killed runner left, and removes its temporary folder.

The runner writes the sessions to stdin (`+<id>`, `-<id>`, one per line). When the runner exits for any reason,
stdin closes, and the watchdog kills the remaining sessions. Only it can then remove their files in the temporary
folder: sockets of a killed engine, episode scratch of a sandbox. The watchdog leads its own session, so Ctrl-C in
the terminal does not reach it.
"""

import shutil
import signal
import sys
from collections.abc import Iterable

from marlaas.local import sessions


def watch(lines: Iterable[str]) -> set[int]:
    """Read the runner's lines until end of file; return the sessions that are left."""
    left: set[int] = set()
    for line in lines:
        (left.add if line.startswith("+") else left.discard)(int(line[1:]))
    return left


def main() -> None:
    """Wait until the runner exits, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for session in watch(sys.stdin):
        sessions.kill(session)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()

"""`python -m marlaas.local.watchdog FOLDER`: ends what a killed runner left running, and removes the run's temporary folder.

It hears on stdin which sessions there are (`+<id>`, `-<id>`, one a line). When the runner is gone, however it went, stdin ends, and the
warden kills the sessions that are left. What they had put into the temporary folder nobody else could remove: an engine that is killed
leaves its sockets there, a sandbox its episodes' scratch. The warden leads its own session, so Ctrl-C in the terminal does not reach it.
"""

import shutil
import signal
import sys
from collections.abc import Iterable

from marlaas.local import sessions


def watch(lines: Iterable[str]) -> set[int]:
    """Follow the runner's story to its end; return the sessions that it left."""
    left: set[int] = set()
    for line in lines:
        (left.add if line.startswith("+") else left.discard)(int(line[1:]))
    return left


def main() -> None:
    """Wait for the runner's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for session in watch(sys.stdin):
        sessions.kill(session)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()

"""`python -m marlaas.local.watchdog FOLDER`: kills the processes that a killed runner left, and removes its temporary folder.

The runner writes the sessions to stdin (`+<id>`, `-<id>`, one per line). When the runner exits for any reason,
stdin closes, and the watchdog kills the remaining sessions. Only it can then remove their files in the temporary
folder: sockets of a killed engine, episode scratch of a sandbox. The watchdog leads its own session, so Ctrl-C in
the terminal does not reach it. A session is a role with all its children: a killed role cannot kill its own children
(an engine's worker, an environment's process), so the whole session is killed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_MAX_ROUNDS, _ROUND_S = 200, 0.01


def session_members(session: int) -> list[int]:
    """Return the pids of the session's live processes. Zombies are left out: they run no code and cannot be killed."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session and not _zombie(pid):
                found.append(pid)
    return found


def kill_session(session: int) -> None:
    """Kill every process of the session, also those that are forked meanwhile. Gives up after about 2 s."""
    for _ in range(_MAX_ROUNDS):
        alive = session_members(session)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
    clean_up(watch(sys.stdin), Path(sys.argv[1]))


def clean_up(sessions: Iterable[int], temporary: Path) -> None:
    """Kill the processes of these sessions, then remove the folder for temporary files, and the link to it if there is one."""
    for session in sessions:
        kill_session(session)
    shutil.rmtree(temporary.resolve(), ignore_errors=True)
    if temporary.is_symlink():
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

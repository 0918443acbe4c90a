"""Kill a role with all its children: each role leads its own session.

A killed role cannot kill its own children (an engine's worker, an environment's process), so the session is killed.
"""

import contextlib
import os
import signal
import time

import psutil

_MAX_ROUNDS, _ROUND_S = 200, 0.01


def members(session: int) -> list[int]:
    """Return the pids of the session's live processes. Zombies are left out: they run no code and cannot be killed."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session and not _zombie(pid):
                found.append(pid)
    return found


def kill(session: int) -> None:
    """Kill every process of the session, also those that are forked meanwhile. Gives up after about 2 s."""
    for _ in range(_MAX_ROUNDS):
        alive = members(session)
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

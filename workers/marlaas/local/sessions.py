"""Ending a role with everything it started: each role leads a session of its own, as a container would hold it.

A role that is killed cannot end its own children (an engine's worker, an environment's child); whoever ends the session does.
"""

import contextlib
import os
import signal
import time

import psutil

_MAX_ROUNDS, _ROUND_S = 200, 0.01


def members(session: int) -> list[int]:
    """Pids of the session that live now; one that is dead and not waited for runs no code and cannot be killed again."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session and not _zombie(pid):
                found.append(pid)
    return found


def kill(session: int) -> None:
    """Kill every process of the session, also those being forked meanwhile; one that the kernel holds is left to it."""
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

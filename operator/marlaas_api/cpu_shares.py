"""Shares of the CPU of processes on one machine, as the niceness of their sessions.

Trainers compute all the time, and so do engines, which have a full share only while a request waits for its version
(`engine_share`). The other roles and commands compute for milliseconds, while an episode, a step or a user waits, so they have a
larger share. Environments that compute for long have a tenth of a trainer's, and what no job waits for has a twentieth.
"""

import os
from pathlib import Path

FULL_SHARE, COMPUTE_SHARE, LOW_SHARE, LEAST_SHARE = 0, 5, 15, 19
"""Niceness, as processes and as sessions, with weights of 1,024, 335, 36 and 15."""
CORE_NICENESS = 5
"""Of the process that computes for an engine on a CPU. The rollout role, in the same session, accepts requests meanwhile, so that
the next batch has more of them.
"""
LATE_S = 0.1
"""Seconds for which a request may wait for its version to be in a slot before the engine gets a full share. Most loads take less."""
_TRIES, _RETRY_S = 10, 0.15
_AUTOGROUP = "/proc/{}/autogroup"


def engine_share(longest_wait_s: float) -> int:
    """Return the niceness of an engine's session: a full share while a request has waited for its version for more than LATE_S.

    With a smaller share, an engine decodes more sequences at once, which takes less CPU for each. But where all cores are in use and
    agents outnumber slots, jobs then wait for slots: with episodes open, and a tenant with few jobs behind one with many.

    longest_wait_s: seconds for which the first of the requests whose version is not in a slot has waited; 0 if none waits.
    """
    return FULL_SHARE if longest_wait_s > LATE_S else COMPUTE_SHARE


def set_share(pid: int, niceness: int) -> bool:
    """Set the niceness of a process's session, its share of the CPU; return False if the kernel refuses another change now.

    Linux gives every session an equal share where no cgroup divides the CPU (`autogroup`); the niceness of processes then
    counts within their session only. Without CAP_SYS_ADMIN, the kernel allows ten changes a second on the whole machine. The
    session of init has no share that could be changed.
    """
    path = Path(_AUTOGROUP.format(pid))
    try:
        if int(path.read_text().split()[-1]) != niceness:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.write(descriptor, str(niceness).encode())
            finally:
                os.close(descriptor)
    except BlockingIOError:
        return False
    except (OSError, ValueError, IndexError):
        pass  # This kernel has no such shares, or the process has ended.
    return True


async def set_share_soon(pid: int, niceness: int) -> None:
    """Set the niceness of a process's session, as `set_share`; while the kernel refuses, try again, for a second and a half in all."""
    import asyncio  # here, because fork servers import this module, and need no asyncio

    for _ in range(_TRIES):
        if set_share(pid, niceness):
            return
        await asyncio.sleep(_RETRY_S)

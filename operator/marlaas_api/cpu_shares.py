"""Shares of the CPU of processes on one machine, as the niceness of their sessions.

Engines and trainers compute all the time. The other roles and commands compute for milliseconds, while an episode, a step or
a user waits, so they have a larger share. Environments that compute for long have a tenth of an engine's, and what
no job waits for has a twentieth.
"""

import os
from pathlib import Path

FULL_SHARE, ENGINE_SHARE, LOW_SHARE, LEAST_SHARE = 0, 5, 15, 19
"""Niceness, as processes and as sessions, with weights of 1,024, 335, 36 and 15."""
_AUTOGROUP = "/proc/{}/autogroup"


def set_share(pid: int, niceness: int) -> bool:
    """Set the niceness of a process's session, its share of the CPU; return False if the kernel did not allow it now.

    Linux gives every session an equal share where no cgroup divides the CPU (`autogroup`); the niceness of processes then
    counts within their session only. Users other than root may change ten sessions a second.
    """
    path = Path(_AUTOGROUP.format(pid))
    try:
        if int(path.read_text().split()[-1]) != niceness:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.write(descriptor, str(niceness).encode())
            finally:
                os.close(descriptor)
        return True
    except (OSError, ValueError, IndexError):
        return False

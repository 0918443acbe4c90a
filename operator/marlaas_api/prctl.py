"""The system call `prctl` of Linux; elsewhere it has no effect.

The C library is looked up at import, because nothing may be imported between fork and exec.
"""

import ctypes
import signal
import sys

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(die: bool = True) -> None:
    """Make the kernel kill this process when the thread that started it exits; False undoes it."""
    _prctl(_SET_PDEATHSIG, int(signal.SIGKILL) if die else 0)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants: orphans become its children instead of init's."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def let_others_look(look: bool) -> None:
    """Let other processes of this user read this one's memory and environment variables, as by default, or not."""
    _prctl(_SET_DUMPABLE, int(look))


def _prctl(option: int, value: int) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)

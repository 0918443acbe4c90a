"""Resource limits, and giving up privileges: what this process can never get more of."""

import ctypes
import os
import resource
import signal
import struct
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_CAPABILITY_VERSION_3 = 0x20080522
_NO_CAPABILITIES = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
_MAX_OPEN_FILES = 32
_SLEEP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use.

    cpu_s: processor time, whole seconds; this is the limit that does not depend on how busy the machine is.
    wall_s: time on the clock, generous (None: four times `cpu_s`), for a program that sleeps or waits.
    memory_bytes: address space, the interpreter's 30 MiB included.
    file_bytes, scratch_bytes: largest file, and all files of the scratch folder together.
    output_bytes: what it may print before it is stopped.
    """

    cpu_s: int = 5
    wall_s: float | None = None
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    output_bytes: int = 256 << 10

    @property
    def clock_s(self) -> float:
        """Seconds on the clock."""
        return self.cpu_s * _SLEEP_FACTOR if self.wall_s is None else self.wall_s


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Bound processor time, memory, files, processes. Raises ValueError, OSError."""
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (limit, limit))


def leave_namespaces() -> bool:
    """Move to a network of its own, with nothing in it, where the kernel and the container allow that; say whether they did.

    A second lock behind the filter of system calls, which denies every socket; so it may be missing.
    """
    return bool(_libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0)


def give_up_privileges(parent: int) -> None:
    """Drop every capability, never gain one again, and die with the parent. Raises OSError, and ends the process if the parent is gone."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    _demand(_libc().capset(header, ctypes.create_string_buffer(_NO_CAPABILITIES)), "capset")
    _demand(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _demand(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")
    if os.getppid() != parent:
        os._exit(1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _demand(returned: int, what: str) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

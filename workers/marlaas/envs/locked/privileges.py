"""Set resource limits and drop privileges, irrevocably for this process."""

import ctypes
import os
import resource
import struct

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9  # importing the module `signal` takes as long as importing all of this package
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_CAPABILITY_VERSION_3 = 0x20080522
_NO_CAPABILITIES = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
_MAX_OPEN_FILES = 32
_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit processor time, memory, files and processes. Raises ValueError, OSError."""
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
    """Move to an empty network namespace, if the kernel and the container allow it; return whether they did.

    A second barrier behind the seccomp filter, which denies every socket; so it is optional.
    """
    return bool(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0)


def give_up_privileges(parent: int) -> None:
    """Drop every capability, set no-new-privileges, and ask for SIGKILL when the parent exits.

    Raises OSError. Exits at once if the parent has already exited.
    """
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    _demand(_libc.capset(header, ctypes.create_string_buffer(_NO_CAPABILITIES)), "capset")
    _demand(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _demand(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "parent death signal")
    if os.getppid() != parent:
        os._exit(1)


def _demand(returned: int, what: str) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

"""Set resource limits, drop privileges and restrict file access, irrevocably for this process."""

import ctypes
import os
import resource
import struct

from . import landlock

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SIGKILL = 9  # importing the module `signal` takes as long as importing all of this package
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_CAPABILITY_VERSION_3 = 0x20080522
_NO_CAPABILITIES = struct.pack("=6I", 0, 0, 0, 0, 0, 0)
_MAX_OPEN_FILES = 32
_NUM_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_MAX_RIGHTS = 16
_VERSION_WITH_TRUNCATE, _VERSION_WITH_TCP, _VERSION_WITH_SCOPES = 3, 4, 6
_ALL_TCP = 0b11
_ALL_SCOPES = 0b11
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


def restrict_files(readable: list[str], scratch: str) -> None:
    """Allow reading these paths, and plain files in the scratch folder; deny all other file access. Raises OSError.

    Newer kernels restrict more, and that is used if available: truncating files (6.2), TCP (6.7), ioctl on devices
    (6.10), signals to and abstract sockets of outside processes (6.12).
    """
    known = landlock.version()
    if known == 0:
        raise OSError(
            "the kernel has no Landlock, or it is switched off (it needs Linux 5.13 and `landlock` in `lsm=`)"
        )
    handled = [(1 << _NUM_RIGHTS_BY_VERSION.get(known, _MAX_RIGHTS)) - 1]
    if known >= _VERSION_WITH_TCP:
        handled.append(_ALL_TCP)
    if known >= _VERSION_WITH_SCOPES:
        handled.append(_ALL_SCOPES)
    ruleset = landlock.create_ruleset(*handled)
    for path in readable:
        try:
            landlock.allow(ruleset, path, landlock.READ_FILE | landlock.READ_DIR)
        except FileNotFoundError:  # a missing path needs no rule
            continue
    written = landlock.WRITE_FILE | landlock.REMOVE_FILE | landlock.MAKE_FILE
    cut = landlock.TRUNCATE if known >= _VERSION_WITH_TRUNCATE else 0
    landlock.allow(ruleset, scratch, landlock.READ_FILE | landlock.READ_DIR | written | cut)
    landlock.restrict_self(ruleset)


def _demand(returned: int, what: str) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

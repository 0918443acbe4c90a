"""File access restrictions by Landlock, which any Linux process may put on itself (kernel 5.13 and newer).

Open files stay open. Newer kernels restrict more, and that is used if available: truncating files (6.2), TCP (6.7),
ioctl on devices (6.10), signals to and abstract sockets of outside processes (6.12). Source: Linux,
Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import stat
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = (
    1 << 1,
    1 << 2,
    1 << 3,
    1 << 5,
    1 << 8,
    1 << 14,
)
_NUM_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_MAX_RIGHTS = 16
_VERSION_WITH_TRUNCATE, _VERSION_WITH_TCP, _VERSION_WITH_SCOPES = 3, 4, 6
_ALL_TCP = 0b11
_ALL_SCOPES = 0b11
_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the kernel's Landlock version; 0 if Landlock is missing or disabled."""
    try:
        return _syscall(_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(readable: list[str], scratch: str) -> None:
    """Allow reading these paths, and plain files in the scratch folder; deny all other file access. Raises OSError.

    The process must have set no-new-privileges before.
    """
    known = version()
    if known == 0:
        raise OSError(
            "the kernel lacks Landlock, or Landlock is disabled (it needs Linux 5.13 and `landlock` in `lsm=`)"
        )
    ruleset = _create_ruleset(known)
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR)
    cut = _TRUNCATE if known >= _VERSION_WITH_TRUNCATE else 0
    _allow(ruleset, scratch, _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | cut)
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _create_ruleset(known: int) -> int:
    fields = [(1 << _NUM_RIGHTS_BY_VERSION.get(known, _MAX_RIGHTS)) - 1]
    if known >= _VERSION_WITH_TCP:
        fields.append(_ALL_TCP)
    if known >= _VERSION_WITH_SCOPES:
        fields.append(_ALL_SCOPES)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    return _syscall(_CREATE_RULESET, attributes, len(attributes), 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:  # a missing path needs no rule
        return
    try:
        of_folders = 0 if stat.S_ISDIR(os.fstat(beneath).st_mode) else _READ_DIR
        _syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights & ~of_folders, beneath), 0)
    finally:
        os.close(beneath)


def _syscall(number: int, *arguments: int | bytes) -> int:
    values = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    returned = int(_libc.syscall(ctypes.c_long(number), *values))
    if returned < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"Landlock: {os.strerror(failed)}")
    return returned

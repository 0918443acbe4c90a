"""System calls of Landlock: restrictions that any Linux process may put on itself, for good (kernel 5.13 and newer).

Two policies use them: `privileges.restrict_files` for programs of a policy, and `marlaas_worker.sandbox.seclusion`
for environments. Open files stay open. Source: Linux, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import stat
import struct

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_FILE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
REFER = 1 << 13
"""Renaming between folders; before version 2, a ruleset forbids that without naming it."""
TRUNCATE = 1 << 14

_OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the kernel's Landlock version; 0 if Landlock is missing or disabled."""
    try:
        return _syscall(_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def create_ruleset(*handled: int) -> int:
    """Return the descriptor of a ruleset. handled: rights that it denies unless a rule allows them, by kind."""
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    return _syscall(_CREATE_RULESET, attributes, len(attributes), 0)


def allow(ruleset: int, path: str, rights: int, flags: int = 0) -> None:
    """Allow rights at and below a path; at a file, only the rights that files have. Raises OSError.

    flags: more flags for opening the path.
    """
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        applicable = rights if stat.S_ISDIR(os.fstat(beneath).st_mode) else rights & _OF_FILES
        _syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", applicable, beneath), 0)
    finally:
        os.close(beneath)


def restrict_self(ruleset: int) -> None:
    """Enforce a ruleset on this process and its descendants, and close it. Raises OSError."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # the kernel requires it
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _syscall(number: int, *arguments: int | bytes) -> int:
    values = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    returned = int(_libc.syscall(ctypes.c_long(number), *values))
    if returned < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"Landlock: {os.strerror(failed)}")
    return returned

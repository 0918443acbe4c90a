"""Landlock sandbox that hides the supervisor's credential from its children, which run as the same user; and their environment variables.

Reading is allowed everywhere except below one path. Any Landlock domain also denies access to processes outside
it (their memory and open files). Without kernel support (before Linux 5.19, or disabled) nothing is restricted.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

ENVIRONMENT_PREFIX = "MARLAAS_ENVIRONMENT_"
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "TZ", "USER", "VIRTUAL_ENV")
FIXED = {
    "PYTHONHASHSEED": "0",  # the same task finds the same content in every sandbox
    "PYTHONUNBUFFERED": "1",  # output printed before a crash is not lost
    "OMP_NUM_THREADS": "1",  # one core per episode: there are many
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the fork server: an allow-list of the supervisor's, without credentials, and `FIXED`."""
    harmless = {k: v for k, v in variables.items() if k in _INHERITED or k.startswith("LC_")}
    return {**harmless, **FIXED}


def given_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables meant for environment code: `MARLAAS_ENVIRONMENT_X` becomes `X`.

    They carry the job's secrets. Set them only once the process is secluded: LD_PRELOAD or PYTHONPATH would
    otherwise run tenant code before that.
    """
    return {k.removeprefix(ENVIRONMENT_PREFIX): v for k, v in variables.items() if k.startswith(ENVIRONMENT_PREFIX)}


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_READ_FILE, _REFER = 1 << 2, 1 << 13
_FIRST_WITH_REFER = 2
"""Before this ABI version, Landlock forbids all renames between folders, which environments need."""
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def secluded(creds: Path) -> Path | None:
    """Return the path to hide from child processes; None if the credential has no path (`/dev/fd`).

    It is the file itself, or the folder of a mounted Secret, whose files are symlinks.
    """
    if creds.is_relative_to("/dev/fd"):
        return None
    return creds.absolute().parent if creds.is_symlink() else creds.absolute()


def seclude(path: Path | None) -> bool:
    """Restrict this process and its descendants for good; return False if the kernel does not support it.

    path: file or folder to hide; None hides no path, but other processes.
    """
    try:
        if _syscall(_CREATE_RULESET, 0, 0, _VERSION_FLAG) < _FIRST_WITH_REFER:
            return False
    except OSError:
        return False
    ruleset = _syscall(_CREATE_RULESET, struct.pack("=Q", _READ_FILE | _REFER), 8, 0)
    for allowed in [Path("/")] if path is None else beside(path):
        _allow(ruleset, allowed)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return True


def beside(path: Path) -> Iterator[Path]:
    """Yield every path that is neither `path` nor one of its parents, for Landlock's allow rules.

    Symlinks are skipped: access is checked at their targets.
    """
    way = path.resolve()
    while way != way.parent:
        yield from (entry for entry in way.parent.iterdir() if entry != way and not entry.is_symlink())
        way = way.parent


def _allow(ruleset: int, path: Path) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or not accessible to us: nothing there can be read anyway
        return
    try:
        rights = _READ_FILE | _REFER if stat.S_ISDIR(os.fstat(beneath).st_mode) else _READ_FILE
        _syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
    finally:
        os.close(beneath)


def _syscall(number: int, *arguments: int | bytes) -> int:
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    returned = int(_libc.syscall(ctypes.c_long(number), *words))
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return returned

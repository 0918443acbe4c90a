"""A filter of system calls for this process, by seccomp's classic BPF, without a library.

What the list (`syscalls`) allows is allowed, some of it for some values of one argument only; all else fails with EPERM, which Python
reports as a PermissionError. A call from a foreign architecture (32-bit code in a 64-bit process has other numbers) kills the process.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from .syscalls import ARCHITECTURES, AUDIT_ARCH, NUMBERS

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_RET_ALLOW = 0x7FFF0000
_RET_ERRNO = 0x00050000
_RET_KILL_PROCESS = 0x80000000
_LOAD_WORD = 0x20
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16

_F_DUPFD, _F_SETLKW, _F_DUPFD_CLOEXEC, _F_GETPIPE_SZ = 0, 7, 1030, 1032
_FIONCLEX, _FIOCLEX, _TCGETS, _FIONREAD = 0x5450, 0x5451, 0x5401, 0x541B
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allow a call if this argument, cut to 32 bits, has one of these values."""

    argument: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unless:
    """Allow a call unless this argument has this value under the mask."""

    argument: int
    mask: int
    value: int


def conditions(pid: int) -> dict[str, OneOf | Unless]:
    """Return what a process of this id may do of the calls that are allowed in part: signals and limits concern itself only."""
    truncates = (
        _O_ACCMODE | _O_TRUNC,
        _O_TRUNC,
    )  # "read only, but empty it": Landlock before its third version lets it pass
    return {
        "fcntl": OneOf(1, (*range(_F_DUPFD, _F_SETLKW + 1), _F_DUPFD_CLOEXEC, _F_GETPIPE_SZ)),
        "ioctl": OneOf(1, (_FIONCLEX, _FIOCLEX, _TCGETS, _FIONREAD)),
        "kill": OneOf(0, (pid,)),
        "open": Unless(1, *truncates),
        "openat": Unless(2, *truncates),
        "prlimit64": OneOf(0, (0,)),
        "tgkill": OneOf(0, (pid,)),
    }


def bpf(machine: str, pid: int) -> bytes:
    """Return the filter's instructions. Raises RuntimeError for an architecture whose numbers are not known."""
    if machine not in ARCHITECTURES:
        raise RuntimeError(f"programs can be locked up on {' and '.join(ARCHITECTURES)} only; this is {machine!r}")
    rules = conditions(pid)
    parts = [_load(_AT_ARCHITECTURE), _if_equal(AUDIT_ARCH[machine], 1, 0), _instruction(_RETURN, _RET_KILL_PROCESS)]
    parts.append(_load(_AT_NUMBER))
    for name, number in numbers(machine).items():
        parts += _rule(number, rules.get(name))
    parts.append(_instruction(_RETURN, _RET_ERRNO | errno.EPERM))
    return b"".join(parts)


def numbers(machine: str) -> Mapping[str, int]:
    """Return the allowed calls of an architecture, by name."""
    column = ARCHITECTURES.index(machine)
    return {name: number for name, row in NUMBERS.items() if (number := row[column]) is not None}


def install() -> None:
    """Hold this process to the filter, for good. It must have given up new privileges before. Raises OSError, RuntimeError."""
    code = bpf(os.uname().machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls (seccomp)")


def _rule(number: int, condition: OneOf | Unless | None) -> list[bytes]:
    """Instructions that decide this call, and that any other call jumps over."""
    if condition is None:
        decision = [_instruction(_RETURN, _RET_ALLOW)]
    elif isinstance(condition, OneOf):
        decision = _one_of(condition)
    else:
        decision = _unless(condition)
    return [_if_equal(number, 0, len(decision)), *decision]


def _one_of(condition: OneOf) -> list[bytes]:
    checks = [_load_argument(condition.argument)]
    for value in condition.values:
        checks += [_if_equal(value, 0, 1), _instruction(_RETURN, _RET_ALLOW)]
    return [*checks, _instruction(_RETURN, _RET_ERRNO | errno.EPERM)]


def _unless(condition: Unless) -> list[bytes]:
    return [
        _load_argument(condition.argument),
        _instruction(_AND, condition.mask),
        _if_equal(condition.value, 1, 0),
        _instruction(_RETURN, _RET_ALLOW),
        _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
    ]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD_WORD, offset)


def _load_argument(index: int) -> bytes:
    """Load the low half: the arguments that are looked at are of 32 bits in the kernel too (both architectures are little-endian)."""
    return _load(_AT_ARGUMENTS + 8 * index)


def _if_equal(value: int, skip_if: int, skip_else: int) -> bytes:
    return _instruction(_JUMP_IF_EQUAL, value, skip_if, skip_else)


def _instruction(code: int, value: int, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, value)

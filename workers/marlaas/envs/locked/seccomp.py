"""Seccomp filter of system calls for this process, as classic BPF, without a library.

Allows the calls in NUMBERS, some only for certain values of one argument. Other calls fail with EPERM, which Python
raises as PermissionError. A call from a foreign architecture (32-bit code in a 64-bit process has other numbers)
kills the process. Left out on purpose are, among others: calls that create sockets, processes, threads, mounts,
links and folders; that change modes or owners; that inspect or signal other processes; io_uring, bpf, keys, and
`prctl`.
"""

import ctypes
import errno
import os
import struct

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


def conditions(pid: int) -> dict[str, list[bytes]]:
    """Return the instructions for calls that are allowed in part. Signals and limits are allowed only for the process itself (`pid`)."""
    truncates = (
        _O_ACCMODE | _O_TRUNC,
        _O_TRUNC,
    )  # O_RDONLY with O_TRUNC empties a file; Landlock before version 3 does not deny that
    return {
        "fcntl": _one_of(1, (*range(_F_DUPFD, _F_SETLKW + 1), _F_DUPFD_CLOEXEC, _F_GETPIPE_SZ)),
        "ioctl": _one_of(1, (_FIONCLEX, _FIOCLEX, _TCGETS, _FIONREAD)),
        "kill": _one_of(0, (pid,)),
        "open": _unless(1, *truncates),
        "openat": _unless(2, *truncates),
        "prlimit64": _one_of(0, (0,)),
        "tgkill": _one_of(0, (pid,)),
    }


def bpf(machine: str, pid: int) -> bytes:
    """Return the filter's instructions. Raises RuntimeError for an unknown architecture."""
    if machine not in ARCHITECTURES:
        raise RuntimeError(
            f"programs can be restricted only on {' and '.join(ARCHITECTURES)}; this machine is {machine!r}"
        )
    rules = conditions(pid)
    parts = [_load(_AT_ARCHITECTURE), _if_equal(AUDIT_ARCH[machine], 1, 0), _instruction(_RETURN, _RET_KILL_PROCESS)]
    parts.append(_load(_AT_NUMBER))
    for name, number in numbers(machine).items():
        parts += _rule(number, rules.get(name) or [_instruction(_RETURN, _RET_ALLOW)])
    parts.append(_instruction(_RETURN, _RET_ERRNO | errno.EPERM))
    return b"".join(parts)


def numbers(machine: str) -> dict[str, int]:
    """Return the allowed system calls of an architecture: name to number."""
    column = ARCHITECTURES.index(machine)
    return {name: number for name, row in NUMBERS.items() if (number := row[column]) is not None}


def install() -> None:
    """Install the filter, irrevocably. The process must have set no-new-privileges before. Raises OSError, RuntimeError."""
    code = bpf(os.uname().machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not accept a seccomp filter")


def _rule(number: int, decision: list[bytes]) -> list[bytes]:
    """Return the instructions that decide this call; other calls jump over them."""
    return [_if_equal(number, 0, len(decision)), *decision]


def _one_of(argument: int, values: tuple[int, ...]) -> list[bytes]:
    """Allow a call if this argument, truncated to 32 bits, has one of these values."""
    checks = [_load_argument(argument)]
    for value in values:
        checks += [_if_equal(value, 0, 1), _instruction(_RETURN, _RET_ALLOW)]
    return [*checks, _instruction(_RETURN, _RET_ERRNO | errno.EPERM)]


def _unless(argument: int, mask: int, value: int) -> list[bytes]:
    """Allow a call unless this argument has this value under the mask."""
    return [
        _load_argument(argument),
        _instruction(_AND, mask),
        _if_equal(value, 1, 0),
        _instruction(_RETURN, _RET_ALLOW),
        _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
    ]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD_WORD, offset)


def _load_argument(index: int) -> bytes:
    """Load the low half of an argument: the kernel uses 32 bits of these arguments, and both architectures are little-endian."""
    return _load(_AT_ARGUMENTS + 8 * index)


def _if_equal(value: int, skip_if: int, skip_else: int) -> bytes:
    return _instruction(_JUMP_IF_EQUAL, value, skip_if, skip_else)


def _instruction(code: int, value: int, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, value)


ARCHITECTURES = ("x86_64", "aarch64")
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NUMBERS: dict[str, tuple[int, int | None]] = {
    "access": (21, None),
    "alarm": (37, None),
    "brk": (12, 214),
    "chdir": (80, 49),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fchdir": (81, 50),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "fstat": (5, 80),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getitimer": (36, 102),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pause": (34, None),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendfile": (40, 71),
    "set_robust_list": (273, 99),
    "setitimer": (38, 103),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "time": (201, None),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Allowed system calls: numbers on x86_64 (asm/unistd_64.h) and aarch64 (asm-generic/unistd.h; None: no such call). A test compares them."""

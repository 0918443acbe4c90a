"""Linux process functions: descendants, memory in use, limits, and killing process trees.

Where the kernel lacks `/proc/*/children`, descendants are not found and only process groups can be killed.
"""

import contextlib
import os
import resource
import signal
import socket
import time

from marlaas_api.prctl import adopt_orphans, die_with_parent, let_others_look

__all__ = ["adopt_orphans", "die_with_parent"]

_CPUCLOCK_SCHED = 2
"""Low bits of the id of a process's CPU clock; the others are the inverted process id, as `clock_getcpuclockid` computes it."""
_RESERVE = 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PART_BYTES = 64 << 10


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    die_with_parent(False)


def hide_from_siblings() -> None:
    """Keep other processes of this user from reading this one's memory and environment variables (credentials).

    It does not protect from root, so a sandbox should not run as root.
    """
    let_others_look(False)


def receive(connection: socket.socket, max_bytes: int, max_descriptors: int) -> tuple[bytes, list[int]]:
    """Receive one packet and the descriptors sent with it.

    Args:
        max_bytes: a longer packet is cut.
        max_descriptors: further descriptors are dropped.

    Returns: the packet, empty once the other end is closed, and the descriptors here. Programs that this process executes do not
    inherit them.
    """
    try:
        packet, descriptors, _, _ = socket.recv_fds(connection, max_bytes, max_descriptors)
    except ConnectionResetError:  # It was closed before it had read all packets.
        return b"", []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # `recv_fds` ignores the flag MSG_CMSG_CLOEXEC
    return packet, descriptors


def open_many_files() -> None:
    """Raise the soft limit of open files to the hard limit, because the supervisor has two descriptors open for every child."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit_memory(limit_bytes: int) -> None:
    """Make allocations of this process fail once it has allocated `_RESERVE` times `limit_bytes`; allocated memory may exceed that in use.

    The fork server checks the memory in use against `limit_bytes` itself.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (_RESERVE * limit_bytes, _RESERVE * limit_bytes))


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; empty if it has exited."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            found += map(int, _read(f"{thread.path}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def cpu_s_of_ended_children() -> float:
    """Return the CPU seconds of all children that this process has reaped, and of the descendants that those children had reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_time_ns(pid: int) -> int:
    """Return the CPU time of a process and its threads, in nanoseconds; -2 if it does not exist."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return -2


def cpu_wait_ns(pid: int) -> int:
    """Return how long the main thread of a process has waited for a CPU while it could run, in nanoseconds; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read(f"/proc/{pid}/schedstat").split()[1])
    return 0


def held_bytes(pid: int) -> int:
    """Return the anonymous and shared memory of a process in bytes; 0 if it has exited."""
    held = 0
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                held += int(line.split()[1]) * 1024
    return held


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, mapped files included; 0 if it has exited.

    It is never less than `held_bytes`, and reading it takes a tenth of the time.
    """
    with contextlib.suppress(OSError):
        return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    return 0


def _read(path: str) -> bytes:
    """Read a file of /proc. `Path` and `open` would take several times as long, and the fork server reads often."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while part := os.read(descriptor, _PART_BYTES):
            data += part
        return data
    finally:
        os.close(descriptor)


def wake_on_child() -> int:
    """Return a descriptor that becomes readable whenever a child exits."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def exited_child() -> int | None:
    """Return the pid of an exited child, which stays reserved until it is waited for; None if there is none."""
    with contextlib.suppress(ChildProcessError):
        exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return exited.si_pid if exited is not None else None
    return None


def kill_group(pid: int) -> None:
    """Kill the process group of a process that is not reaped yet."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def kill_all(pid: int) -> None:
    """Kill a process, which must not be reaped yet, its process group, and all its descendants."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    for descendant in descendants(pid):
        with contextlib.suppress(OSError):
            os.kill(descendant, signal.SIGKILL)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)

"""Start a restricted program, watch it, stop it, and report how it ended. Its failures are charged to the policy.

If a restriction cannot be put in place, nothing runs and NotLocked is raised: a fault of the machine, not of the
policy.
"""

import contextlib
import itertools
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from marlaas.envs.locked.child import LOCKED

_SLEEP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program.

    cpu_s: processor time in whole seconds. Unlike `wall_s`, it does not depend on the machine's load.
    wall_s: wall-clock seconds, generous, for a program that sleeps or waits. None: four times `cpu_s`.
    memory_bytes: address space, including the interpreter's 30 MiB.
    file_bytes, scratch_bytes: largest file, and all files of the scratch folder together.
    output_bytes: printed bytes after which the program is stopped.
    """

    cpu_s: int = 5
    wall_s: float | None = None
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    scratch_bytes: int = 8 << 20
    output_bytes: int = 256 << 10

    @property
    def clock_s(self) -> float:
        """Wall-clock limit in seconds."""
        return self.cpu_s * _SLEEP_FACTOR if self.wall_s is None else self.wall_s


_PACKAGE = Path(__file__).parent
_START = f"import sys; sys.path.append({str(_PACKAGE.parent)!r}); from {_PACKAGE.name}.child import main; sys.path.pop(); main()"
_FLAGS = ("-S", "-P", "-B", "-X", "utf8")
_START_S = 60.0
_LOOK_S = 0.1
_PART_BYTES = 64 << 10
_MAX_FILES = 1000
_BLOCK_BYTES = 512
_BY_THE_KERNEL = {
    signal.SIGKILL: "it used more processor time or memory than it may",
    signal.SIGSYS: "it made a forbidden system call",
}


class NotLocked(Exception):
    """This machine cannot restrict a program, so no program runs."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a program. `stopped` is the reason why it was stopped; None if it ended by itself.

    `output` holds standard output and standard error.
    """

    output: str
    exit_code: int
    stopped: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.exit_code == 0 and self.stopped is None


def run_program(program: str, limits: Limits | None = None) -> Ran:
    """Run a Python program with restrictions and return its result. Raises NotLocked."""
    if sys.platform != "linux":
        raise NotLocked(f"programs are restricted by features of Linux, so none can run on {sys.platform}")
    limits = limits or Limits()
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as scratch,
        _started(program, limits, scratch) as (process, ready),
    ):
        _wait_for_locks(process, ready)
        output, stopped = _watched(process, limits, scratch)
        return _ended(output, process.returncode, stopped)


@contextlib.contextmanager
def _started(program: str, limits: Limits, scratch: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the process; kill and reap it when the context ends."""
    ready, says_ready = os.pipe()
    try:
        with tempfile.TemporaryFile() as orders:
            wanted = {"program": program, "parent": os.getpid(), "ready": says_ready, **asdict(limits)}
            orders.write(marshal.dumps(wanted))
            orders.seek(0)
            process = _popen(orders, says_ready, scratch)
    finally:
        os.close(says_ready)
    try:
        with process:
            try:
                yield process, ready
            finally:
                process.kill()
    finally:
        os.close(ready)


def _popen(orders: IO[bytes], says_ready: int, scratch: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *_FLAGS, "-c", _START],
        stdin=orders,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(says_ready,),
        cwd=scratch,
        env={"PYTHONHASHSEED": "0", **{k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}},
        bufsize=0,
    )


def _wait_for_locks(process: subprocess.Popen[bytes], ready: int) -> None:
    """Wait until the process has restricted itself. This time does not count against the program. Raises NotLocked."""
    with selectors.DefaultSelector() as selector:
        selector.register(ready, selectors.EVENT_READ)
        in_time = selector.select(_START_S)
    if in_time and os.read(ready, len(LOCKED)) == LOCKED:
        return
    process.kill()
    printed = process.stdout.read().decode(errors="replace").strip() if process.stdout else ""
    why = printed.splitlines()[-1] if printed else f"its process did not start in {_START_S:g} s"
    raise NotLocked(f"programs cannot be restricted on this machine, so none is run: {why}")


def _watched(process: subprocess.Popen[bytes], limits: Limits, scratch: str) -> tuple[bytes, str | None]:
    """Collect the output until the process ends or exceeds a limit, then kill and reap it."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    ended = os.pidfd_open(process.pid)
    printed, stopped = bytearray(), None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + limits.clock_s
            while stopped is None:
                ready = {key.fd for key, _ in selector.select(min(_LOOK_S, max(0.0, deadline - time.monotonic())))}
                if process.stdout.fileno() in ready and not _take(process.stdout, printed):
                    selector.unregister(process.stdout)
                if ended in ready:
                    break
                stopped = _excess(limits, len(printed), scratch, time.monotonic() >= deadline)
        process.kill()
        process.wait()
        while len(printed) <= limits.output_bytes and _take(process.stdout, printed):
            pass
    finally:
        os.close(ended)
    return bytes(printed[: limits.output_bytes]), stopped


def _take(stream: IO[bytes], printed: bytearray) -> bool:
    """Read a part of the output; return False at the end of file, or if nothing is available."""
    part = stream.read(_PART_BYTES)
    printed += part or b""
    return bool(part)


def _excess(limits: Limits, num_printed: int, scratch: str, is_late: bool) -> str | None:
    """Return the limit that a running program exceeds, as text; None if there is none."""
    if num_printed > limits.output_bytes:
        return f"it printed more than {limits.output_bytes >> 10} KiB"
    if is_late:
        return f"it took longer than {limits.clock_s:g} s"
    num_files, held_bytes = _contents(scratch)
    if num_files > _MAX_FILES or held_bytes > limits.scratch_bytes:
        return f"it wrote more than {limits.scratch_bytes >> 20} MiB or {_MAX_FILES} files"
    return None


def _contents(scratch: str) -> tuple[int, int]:
    """Return the number of files in the folder, counted up to one more than the limit, and their bytes on disk."""
    num_files, held_bytes = 0, 0
    with os.scandir(scratch) as entries:
        for entry in itertools.islice(entries, _MAX_FILES + 1):
            num_files += 1
            with contextlib.suppress(OSError):  # the file is gone already
                held_bytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    return num_files, held_bytes


def _ended(output: bytes, code: int, stopped: str | None) -> Ran:
    text = output.decode(errors="replace")
    if stopped is None and code < 0:
        known = {number.value: number.name for number in signal.Signals}
        crashed = f"the interpreter crashed ({known.get(-code, f'signal {-code}')})"
        stopped = next((why for number, why in _BY_THE_KERNEL.items() if number == -code), crashed)
    return Ran(text, code, stopped)


_HOLDS = "all restrictions hold"
_PROBE = f"""
import ctypes, os, socket

def holds(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False

parent = os.getppid()
attempts = dict(
    network=socket.socket,
    processes=os.fork,
    reading=lambda: open({str(Path(__file__).resolve())!r}),
    writing=lambda: open(os.getcwd() + "-outside", "w"),
    environment=lambda: open(f"/proc/{{parent}}/environ", "rb"),
    memory=lambda: open(f"/proc/{{parent}}/mem", "rb"),
    signals=lambda: os.kill(parent, 0),
)
broken = [name for name, attempt in attempts.items() if not holds(attempt)]
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
if libc.ptrace(PTRACE_SEIZE, parent, 0, 0) != -1:
    broken.append("ptrace")
print("not restricted: " + ", ".join(broken) if broken else {_HOLDS!r})
"""


def prove() -> None:
    """Run the probe. Raises NotLocked if an operation is not denied."""
    ran = run_program(_PROBE, Limits(cpu_s=10, wall_s=120))
    if ran.output.strip() != _HOLDS:
        reason = (ran.stopped or ran.output).strip() or f"exit code {ran.exit_code}"
        raise NotLocked(f"programs cannot be restricted on this machine, so none is run: {reason}")

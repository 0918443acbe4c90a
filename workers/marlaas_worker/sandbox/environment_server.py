"""The fork server of an environment with its own image; it listens on a socket shared with the supervisor.

It serves one supervisor at a time, each in a forked process. That process loads the environment with the
arguments of the first packet (passed as a descriptor, because a packet's size is limited), and then serves like
the fork server of a builtin environment. The listening process runs no environment code. On SIGTERM it waits
until a connected supervisor has ended: both containers get the signal at once, and episodes may still finish.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from marlaas_api.errors import InvalidInput
from marlaas_worker.sandbox import kernel
from marlaas_worker.sandbox.forkserver import load_and_serve
from marlaas_worker.sandbox.seclusion import FIXED

_SETUP_BYTES = 64


def settle_variables() -> None:
    """Re-exec this program if it lacks the variables of `seclusion.FIXED`: Python reads PYTHONHASHSEED only at start."""
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        os.environ.update(FIXED)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def serve(name: str, path: Path) -> None:
    """Serve an environment to one supervisor after another, until SIGTERM or SIGINT.

    Args:
        name: the environment, as `module:attribute` or a builtin's name.
        path: where to create the Unix socket on which supervisors connect.

    Raises:
        InvalidInput: the socket cannot be created.
    """
    stopped = _stop_descriptor()
    kernel.adopt_orphans()
    with _listening(path) as listener:
        while (control := _next(listener, stopped)) is not None:
            pid = os.fork()
            if pid == 0:
                listener.close()
                _serve_supervisor(name, control)
            control.close()
            _wait_and_clean_up(pid)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)  # left over from an earlier run of this container
        listener.bind(str(path))
    except OSError as error:
        raise InvalidInput(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.listen(1)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _next(listener: socket.socket, stopped: int) -> socket.socket | None:
    """Wait for a supervisor and return its connection; return None on SIGTERM or SIGINT. stopped: descriptor of `_stop_descriptor`."""
    watched: list[socket.socket | int] = [listener, stopped]
    ready, _, _ = select.select(watched, [], [])
    return None if stopped in ready else listener.accept()[0]


def _serve_supervisor(name: str, control: socket.socket) -> NoReturn:
    """Serve one supervisor in this forked process, then exit. name: of the environment. control: connection to the supervisor."""
    scratch = tempfile.mkdtemp(prefix="environment-")
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        kernel.die_with_parent()
        packet, descriptors = kernel.receive(control, _SETUP_BYTES, 1)
        if packet and descriptors:
            with os.fdopen(descriptors[0]) as file:
                setup = json.load(file)
            load_and_serve(control, {**setup, "name": name, "scratch": scratch}, lambda: None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)


def _wait_and_clean_up(pid: int) -> None:
    """Wait for the exit of a supervisor's process, then kill and reap its descendants."""
    while os.waitpid(-1, 0)[0] != pid:
        pass
    with contextlib.suppress(ChildProcessError):
        while True:
            for orphan in kernel.children(os.getpid()):
                kernel.kill_all(orphan)
            os.waitpid(-1, 0)


def _stop_descriptor() -> int:
    """Return a descriptor that becomes readable, for good, on SIGTERM or SIGINT."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable

"""The common parent of a machine's sandboxes: it imports their code once, and forks a supervisor for every request.

`marlaas run` starts it (`python -m marlaas_worker sandbox --parent FD`), because 32 processes that import the same code
take 30 s of CPU and 1.5 GiB. On Kubernetes every sandbox is a process of its own. Invariants: it has one thread, no event
loop and no connection, so that forking is safe; it never reads a credential. It starts the `template` of fork servers.

A request is a JSON packet on the socket FD, with the arguments of the role, and the descriptors of its log and its
credentials. The answers are `started` with a process id, in the order of the requests, and later `ended` with the exit
code. It exits when the socket closes, and the kernel then kills its supervisors.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Imported for the processes that are forked.
from marlaas_worker.sandbox import kernel, service
from marlaas_worker.sandbox.seclusion import TEMPLATE, clean_variables

MAX_PACKET_BYTES = 64 << 10
MAX_DESCRIPTORS = 8
EXIT_THREADS = 3
"""Exit code of a parent that has more than one thread after its imports, and so must not fork."""

Role = Callable[[Sequence[str]], int]
"""Runs a role with these arguments to its end, and returns its exit code."""


def serve(descriptor: int, role: Role) -> int:
    """Fork a supervisor per request until the socket closes; return this process's exit code."""
    assert service
    kernel.hide_from_siblings()
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.stderr.write("the common parent of sandboxes has more than one thread, so it cannot fork\n")
        return EXIT_THREADS
    gc.collect()
    gc.freeze()  # a collection in a supervisor would write to every shared page
    with socket.socket(fileno=descriptor) as control:
        Parent(control, role, _start_template()).serve()
    return 0


def _start_template() -> int:
    """Start the template of fork servers, and set the variable by which supervisors find it; return its process id."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        template = subprocess.Popen(
            # -s: episodes could write below HOME, and a fork server is not secluded when it is forked.
            [sys.executable, "-P", "-s", "-m", "marlaas_worker.sandbox.template", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=clean_variables(os.environ),
        )
    os.environ[TEMPLATE] = str(ours.detach())
    return template.pid


class Parent:
    """Forks supervisors by request and reports their ends."""

    def __init__(self, control: socket.socket, role: Role, template: int) -> None:
        self._control = control
        self._role = role
        self._template = template
        self._wake = kernel.wake_on_child()

    def serve(self) -> None:
        """Execute requests until the socket closes."""
        watched: list[socket.socket | int] = [self._control, self._wake]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._report_ended()
            if self._control in ready:
                packet, descriptors = kernel.receive(self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
                if not packet:
                    return
                self._fork(json.loads(packet), descriptors)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        own = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(failed=f"cannot fork: {error.strerror}")
        else:
            if pid == 0:
                self._become(request, descriptors, own)
            self._report(started=pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(self, request: dict[str, Any], descriptors: list[int], parent: int) -> NoReturn:
        """In the forked process: be the role, as if it had been started with these arguments, and exit."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake)
            os.setsid()
            log, *inherited = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ["MARLAAS_PARENT_PID"] = str(parent)
            places = dict(zip(map(_path, request["descriptors"]), map(_path, inherited), strict=True))
            code = self._role([places.get(word, word) for word in request["arguments"]])
        except SystemExit as end:  # of the argument parser
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _report_ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] != self._template:
                    self._report(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))

    def _report(self, **report: object) -> None:
        with contextlib.suppress(OSError):  # the runner has exited: the next receive returns no packet
            self._control.send(json.dumps(report).encode())


def _path(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"

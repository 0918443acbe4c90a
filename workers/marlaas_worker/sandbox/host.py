"""Runs all sandboxes of a `marlaas run` in one process, each as it would run in a process of its own.

`marlaas run` starts it (`python -m marlaas_worker sandbox --host FD`), because 32 processes that import the same code
take 30 s of CPU and 1.5 GiB. On Kubernetes every sandbox is a process of its own. Each sandbox has a bus connection with its
job's credentials, a log, and a fork server, which is started by exec. Environment code runs only in fork servers and their children.

A request is a JSON packet on the socket FD, with the number of a sandbox: `start`, with the arguments of the role and the descriptors
of the log and the credentials; `stop`: the sandbox drains; or `kill`. When a sandbox ends, the answer is `ended` with its number and
exit code. The process exits when the socket closes.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from marlaas_worker.role import end_tasks
from marlaas_worker.sandbox import kernel

MAX_PACKET_BYTES = 64 << 10
MAX_DESCRIPTORS = 8

Role = Callable[[Sequence[str], IO[str], asyncio.Event], Awaitable[int]]
"""Runs a role until it ends and returns its exit code. Takes the role's command-line arguments, its log, and an event that asks it to drain."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sandbox:
    running: "asyncio.Task[int]"
    stop: asyncio.Event


class Host:
    """Starts, drains and kills sandboxes by the requests on a socket, and reports there when a sandbox has ended.

    control: the socket; it has one packet per request or report. role: runs one sandbox.
    """

    def __init__(self, control: socket.socket, role: Role) -> None:
        self._control = control
        self._role = role
        self._sandboxes: dict[int, _Sandbox] = {}
        self._closed = asyncio.Event()

    async def serve(self) -> None:
        """Execute requests until the socket closes, then end all sandboxes."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._receive)
        try:
            await self._closed.wait()
        finally:
            loop.remove_reader(self._control)
            await end_tasks([one.running for one in self._sandboxes.values()])

    def _receive(self) -> None:
        packet, descriptors = kernel.receive(self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        if packet:
            self._execute(json.loads(packet), descriptors)
        else:
            self._closed.set()

    def _execute(self, request: dict[str, Any], descriptors: list[int]) -> None:
        number = request["number"]
        if request["request"] == "start":
            stop = asyncio.Event()
            running = asyncio.create_task(self._run(request, descriptors, stop), name=f"sandbox {number}")
            self._sandboxes[number] = _Sandbox(running, stop)
            running.add_done_callback(lambda _: self._report(number))
        elif (sandbox := self._sandboxes.get(number)) is not None:
            if request["request"] == "stop":
                sandbox.stop.set()
            else:
                sandbox.running.cancel()

    async def _run(self, request: dict[str, Any], descriptors: list[int], stop: asyncio.Event) -> int:
        """Run one sandbox until it ends or has drained; return the exit code that it would have as a process of its own.

        Args:
            request: the `start` packet. Its `arguments` may contain `/dev/fd/N`, where N is one of the sender's numbers in `descriptors`;
                they are replaced by the numbers here.
            descriptors: the log, then those of `request`. All are closed at the end. The sandbox's fork server does not inherit them.
            stop: set to drain the sandbox.
        """
        try:
            log, *inherited = descriptors
            places = dict(zip(map(_path, request["descriptors"]), map(_path, inherited), strict=True))
            with os.fdopen(log, "w", buffering=1) as file:
                return await self._role([places.get(word, word) for word in request["arguments"]], file, stop)
        except SystemExit as end:  # of the argument parser
            return end.code if isinstance(end.code, int) else 1
        except Exception:
            _log.exception("sandbox %d crashed", request["number"])
            return 1
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def _report(self, number: int) -> None:
        running = self._sandboxes.pop(number).running
        code = -signal.SIGKILL if running.cancelled() else running.result()
        with contextlib.suppress(OSError):  # the runner has exited: the next receive returns no packet
            self._control.send(json.dumps({"ended": number, "code": code}).encode())


def _path(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"


async def serve(descriptor: int, role: Role) -> None:
    """Run sandboxes by the requests on a socket (`Host`) until the other end closes it.

    descriptor: of the socket. role: runs one sandbox.
    """
    kernel.hide_from_siblings()
    with socket.socket(fileno=descriptor) as control:
        await Host(control, role).serve()

"""The runner's end of the common parent of sandboxes (`marlaas_worker.sandbox.parent`): starts it, asks it for supervisors, hears of their ends."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from marlaas.local.watchdog import kill_session

PACKET_BYTES = 64 << 10
END_S = 5.0


class Sessions(Protocol):
    """Registry of the sessions that end with the runner."""

    def add(self, session: int) -> None:
        """Register a session."""
        ...

    def remove(self, session: int) -> None:
        """Unregister a session that has ended."""
        ...


class ParentLost(Exception):
    """The common parent has exited, or cannot fork; start the role as a process of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class ForkedProcess:
    """A role that the common parent has forked; the part of `asyncio.subprocess.Process` that the runner uses."""

    pid: int
    ended: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> int:
        """Wait for its end and return its exit code, as in `subprocess`."""
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError if it has ended."""
        if self.ended.done():
            raise ProcessLookupError
        os.kill(self.pid, number)


class SandboxParent:
    """One running common parent."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()
        self._forked: dict[int, ForkedProcess] = {}
        self._lost = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def fork(self, arguments: Sequence[str], log: IO[bytes], descriptors: tuple[int, ...]) -> ForkedProcess:
        """Have a sandbox role forked. descriptors: open files that arguments name as `/dev/fd/N`.

        Raises ParentLost.
        """
        packet = json.dumps({"arguments": list(arguments), "descriptors": descriptors}).encode()
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            if self._lost:
                raise ParentLost("it has exited")
            socket.send_fds(self._control, [packet], [log.fileno(), *descriptors])
        except OSError as error:
            raise ParentLost(f"it takes no request: {error}") from error
        self._asked.append(answer)
        return await answer

    async def listen(self) -> None:
        """Receive its reports until it exits; all its roles have then ended."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while packet := await loop.sock_recv(self._control, PACKET_BYTES):
                self._on_report(json.loads(packet))
        self._lose()

    def _on_report(self, report: dict[str, int]) -> None:
        if "ended" in report:
            forked = self._forked.pop(report["ended"])
            forked.ended.set_result(report["code"])
            return
        answer = self._asked.popleft()
        if "started" in report:
            forked = self._forked[report["started"]] = ForkedProcess(report["started"])
            if not answer.cancelled():
                answer.set_result(forked)
        elif not answer.cancelled():
            answer.set_exception(ParentLost(str(report["failed"])))

    def _lose(self) -> None:
        """Fail pending requests and mark all roles as killed: the kernel kills them with the parent."""
        self._lost = True
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(ParentLost("it has exited"))
        for forked in self._forked.values():
            forked.ended.set_result(-signal.SIGKILL)
        self._asked.clear()
        self._forked.clear()

    async def close(self) -> None:
        """End it, and all its roles with it."""
        self._control.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        await asyncio.to_thread(kill_session, self._process.pid)
        await self._process.wait()


@contextlib.asynccontextmanager
async def sandbox_parent(
    command: Sequence[str], log: IO[bytes], variables: Mapping[str, str], sessions: Sessions
) -> AsyncIterator[SandboxParent]:
    """Start a common parent; it ends with the context.

    command: the command line of a role, which `sandbox --parent FD` follows.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("sandbox", "--parent", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=variables,
            start_new_session=True,
        )
    sessions.add(process.pid)
    parent = SandboxParent(process, ours)
    listening = asyncio.create_task(parent.listen(), name="common parent of sandboxes")
    try:
        yield parent
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        await parent.close()
        sessions.remove(process.pid)

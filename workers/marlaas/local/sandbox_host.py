"""The runner's end of the process that serves all sandboxes (`marlaas_worker.sandbox.host`): starts it, asks it for sandboxes, hears of their ends."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from marlaas.local.folder import translated
from marlaas.local.watchdog import kill_session

PACKET_BYTES = 64 << 10
END_S = 5.0
_BUSY_S = 0.01


class Sessions(Protocol):
    """Registry of the sessions that end with the runner."""

    def add(self, session: int) -> None:
        """Register a session."""
        ...

    def remove(self, session: int) -> None:
        """Unregister a session that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class HostCommand:
    """Command line, environment and log of the process."""

    command: Sequence[str]
    """Command line of a role; `sandbox --host FD` is appended."""
    variables: Mapping[str, str]
    log: Path
    """Output of the process itself; each sandbox has a log of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedSandbox:
    """A sandbox in the process of all sandboxes; the part of `asyncio.subprocess.Process` that the runner uses."""

    number: int
    process: "HostProcess"
    ended: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> int:
        """Wait for its end and return the exit code that it would have as a process, as in `subprocess`."""
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        """Ask it to drain."""
        self.process.ask("stop", self.number)

    def kill(self) -> None:
        """End it at once."""
        self.process.ask("kill", self.number)


class HostProcess:
    """One run of the process, and its sandboxes."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, sessions: Sessions) -> None:
        self.pid = process.pid
        self.has_ended = False
        self._process = process
        self._control = control
        self._sessions = sessions
        self._sandboxes: dict[int, HostedSandbox] = {}
        self._listening = asyncio.create_task(self._listen(), name="process of all sandboxes")
        sessions.add(self.pid)

    async def start(
        self, number: int, arguments: Sequence[str], log: IO[bytes], descriptors: tuple[int, ...]
    ) -> HostedSandbox:
        """Have a sandbox started. If the process ends before, the sandbox has ended with it."""
        request = {"request": "start", "number": number, "arguments": list(arguments), "descriptors": descriptors}
        sandbox = self._sandboxes[number] = HostedSandbox(number, self)
        while not self.has_ended:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [log.fileno(), *descriptors])
                return sandbox
            except BlockingIOError:  # it still starts, and many requests wait
                await asyncio.sleep(_BUSY_S)
            except OSError:
                break
        await self.end()
        return sandbox

    def ask(self, request: str, number: int) -> None:
        """Send a request about a sandbox. A process that has stopped to take requests is killed."""
        if number in self._sandboxes:
            try:
                self._control.send(json.dumps({"request": request, "number": number}).encode())
            except OSError:
                kill_session(self.pid)

    async def end(self) -> None:
        """End the process, and all its sandboxes with it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        await asyncio.to_thread(kill_session, self.pid)
        await asyncio.wait({self._listening})

    async def _listen(self) -> None:
        """Receive reports until the process ends; all its sandboxes have then ended."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while packet := await loop.sock_recv(self._control, PACKET_BYTES):
                self._on_report(json.loads(packet))
        code = await self._process.wait()
        self._control.close()
        self.has_ended = True
        await asyncio.to_thread(kill_session, self.pid)
        self._sessions.remove(self.pid)
        for sandbox in self._sandboxes.values():
            sandbox.ended.set_result(code)
        self._sandboxes.clear()

    def _on_report(self, report: dict[str, Any]) -> None:
        self._sandboxes.pop(report["ended"]).ended.set_result(report["code"])


class SandboxHost:
    """Starts sandboxes in one process, which is started for the first of them, and again for the next after it has ended."""

    def __init__(self, command: HostCommand, sessions: Sessions) -> None:
        self._command = command
        self._sessions = sessions
        self._process: HostProcess | None = None
        self._num_started = 0

    @property
    def pid(self) -> int | None:
        """Id of the process; None if none runs."""
        return None if self._process is None or self._process.has_ended else self._process.pid

    async def start(self, arguments: Sequence[str], log: IO[bytes], descriptors: tuple[int, ...]) -> HostedSandbox:
        """Start a sandbox. descriptors: open files that arguments name as `/dev/fd/N`. Raises InvalidInput if the log cannot be written."""
        if self._process is None or self._process.has_ended:
            self._process = await self._started()
        self._num_started += 1
        return await self._process.start(self._num_started, arguments, log, descriptors)

    def kill(self) -> None:
        """Kill the process, and all sandboxes with it."""
        if (pid := self.pid) is not None:
            kill_session(pid)

    async def _started(self) -> HostProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with translated(self._command.log):
            log = self._command.log.open("ab", buffering=0)
        with theirs, log:
            process = await asyncio.create_subprocess_exec(
                *self._command.command,
                *("sandbox", "--host", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._command.variables,
                start_new_session=True,
            )
        return HostProcess(process, ours, self._sessions)

    async def close(self) -> None:
        """End the process, and all sandboxes with it."""
        if self._process is not None:
            await self._process.end()


@contextlib.asynccontextmanager
async def sandbox_host(command: HostCommand, sessions: Sessions) -> AsyncIterator[SandboxHost]:
    """Serve sandboxes in one process, which ends with the context."""
    host = SandboxHost(command, sessions)
    try:
        yield host
    finally:
        await host.close()

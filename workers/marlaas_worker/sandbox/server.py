"""The supervisor's handle of one fork server: start it, send orders, receive reports, stop it.

It uses processes and pipes, and knows neither the bus nor episodes. A fork server in another container is
connected to instead (`environment_socket`). Reports are validated, because environment code runs beside the
fork server, or in another container is the fork server.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.sandbox.output import Output

_PACKET_BYTES = 64 << 10
_STACK_S = 0.5
_OUTERMOST_FRAME = b"in _run_module_as_main"
_BUSY_S = 0.01
_END_S = 10.0

NO_REPORT = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Exceptions raised by malformed reports. Deeply nested JSON raises RecursionError, which is not a ValueError."""

log = logging.getLogger(__name__)


class BrokenEnvironment(Permanent):
    """The environment could not be imported or created; the text is its traceback or the reason."""


class ForkServerLost(Retryable):
    """The fork server exited, and with it every child; or the machine has no room for a process."""


@dataclass(frozen=True, slots=True)
class ChildrenConfig:
    """Configuration of the child processes.

    Attributes:
        name, args: the environment and its arguments.
        load_timeout_s: limit of importing and creating the environment.
        scratch: folder for temporary files.
        variables: environment variables of the fork server.
        secluded: path that no child may read (`seclusion`); None: no path.
        given: more variables, set after the process is secluded.
    """

    name: str
    args: Mapping[str, Any]
    memory_bytes: int
    load_timeout_s: float
    scratch: Path
    variables: Mapping[str, str]
    secluded: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a child.

    Attributes:
        status: exit status, negative for a signal, None if unknown.
        cause: the fork server's reason for killing it; empty if it did not.
    """

    status: int | None
    cause: str = ""


@dataclass(slots=True)
class Child:
    """One episode's process. `ended` resolves when it has exited."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: Output
    server: "Server"
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def kill(self) -> None:
        """Kill it and all its descendants; return when they are gone."""
        with contextlib.suppress(ForkServerLost):
            if not self.ended.done():
                await self.server.order("kill", self.number)
        await asyncio.wait({self.ended}, timeout=_END_S)
        if not self.ended.done():
            self.server.condemn()
            await self.ended

    async def print_stack(self) -> None:
        """Make the child print its stack, if it still can."""
        with contextlib.suppress(ForkServerLost):
            await self.server.order("stack", self.number)
        await self.output.mentions(_OUTERMOST_FRAME, _STACK_S)

    def close(self) -> None:
        """Close its pipes."""
        self.writer.close()
        self.output.close()


class ServerProcess(Protocol):
    """Process of a fork server, local or remote."""

    async def ended(self) -> None:
        """Return when the process has exited, after its control socket was closed."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...

    def reap(self, pids: Iterable[int]) -> None:
        """Kill the remains of its children, after its exit."""
        ...


@dataclass(frozen=True, slots=True)
class LocalServerProcess:
    """A fork server that the supervisor started."""

    process: asyncio.subprocess.Process

    async def ended(self) -> None:
        await self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def reap(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


class Server:
    """A running fork server and its children."""

    def __init__(self, life: ServerProcess, control: socket.socket, output: Output) -> None:
        self.output = output
        self.pids: dict[int, int] = {}
        self.children: dict[int, Child] = {}
        self.lost = asyncio.Event()
        self._life = life
        self._control = control
        self._listening = asyncio.create_task(self._listen(), name="sandbox fork server reports")

    @property
    def is_lost(self) -> bool:
        """Whether it has exited."""
        return self.lost.is_set()

    async def order(self, order: str, number: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order; wait while the server's queue of orders is full. Raises ForkServerLost."""
        packet = json.dumps({"order": order, "number": number}).encode()
        while not self.is_lost:
            try:
                socket.send_fds(self._control, [packet], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(_BUSY_S)
            except OSError as error:
                raise ForkServerLost(f"the fork server takes no orders: {error}") from error
        raise ForkServerLost("the fork server has ended")

    def condemn(self) -> None:
        """Kill a server that does not respond; its children end with it."""
        self._life.kill()

    async def end(self) -> None:
        """Close the control socket, on which the server kills its children and exits; kill it when it does not."""
        self._listening.cancel()
        # Wait before closing the descriptor: the loop would otherwise keep reading from the next file with its number.
        await asyncio.wait({self._listening})
        self._control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._life.ended()
        except TimeoutError:
            self.condemn()
            await self._life.ended()
        self._lose()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._control, _PACKET_BYTES):
                self._hear(json.loads(packet))
        except OSError:
            pass
        except NO_REPORT as error:
            log.warning("the fork server said what is no report: %s: %s", type(error).__name__, error)
            self.condemn()
        await self._life.ended()
        self._lose()

    def _hear(self, report: dict[str, Any]) -> None:
        number = int(report["number"])
        if report["report"] == "forked":
            self.pids[number] = int(report["pid"])
            return
        self.pids.pop(number, None)
        ended = _ended(report)
        child = self.children.pop(number, None)
        if child is not None and not child.ended.done():
            child.ended.set_result(ended)

    def _lose(self) -> None:
        """Mark the server as lost, kill the remains of its children, and resolve their `ended`."""
        self.lost.set()
        self._life.reap(self.pids.values())
        self.pids.clear()
        for child in self.children.values():
            if not child.ended.done():
                child.ended.set_result(Ended(None, "fork server"))
        self.children.clear()
        self._control.close()
        self.output.close()


def _ended(report: Mapping[str, Any]) -> Ended:
    """Parse the report of a child's end. Raises one of NO_REPORT."""
    status, cause = report["status"], str(report["cause"])
    if status is None:
        return Ended(None, cause)
    if status < 0:
        signal.Signals(-status)
    return Ended(int(status), cause)


async def start_server(config: ChildrenConfig) -> Server:
    """Start a fork server and wait until it has loaded the environment. Raises BrokenEnvironment."""
    shutil.rmtree(config.scratch, ignore_errors=True)
    config.scratch.mkdir(parents=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    output_read, output_write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        # -s: earlier episodes could write below HOME, and this process is not secluded yet.
        *(sys.executable, "-P", "-s", "-m", "marlaas_worker.sandbox.forkserver", str(theirs.fileno())),
        stdin=asyncio.subprocess.PIPE,
        stdout=output_write,
        stderr=output_write,
        pass_fds=(theirs.fileno(),),
        env=dict(config.variables),
        start_new_session=True,
    )
    theirs.close()
    os.close(output_write)
    output = Output(output_read)
    try:
        await _loaded(process, ours, output, config)
    except BaseException:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        output.close()
        raise
    return Server(LocalServerProcess(process), ours, output)


async def _loaded(
    process: asyncio.subprocess.Process, control: socket.socket, output: Output, config: ChildrenConfig
) -> None:
    """Send the configuration and wait until the environment is loaded. Raises BrokenEnvironment."""
    assert process.stdin is not None
    setup = {
        "name": config.name,
        "args": config.args,
        "memory_bytes": config.memory_bytes,
        "scratch": str(config.scratch),
        "secluded": str(config.secluded) if config.secluded is not None else None,
        "given": dict(config.given),
    }
    process.stdin.write(json.dumps(setup).encode())
    process.stdin.close()
    await loaded(control, output, config.load_timeout_s)


async def loaded(control: socket.socket, output: Output, timeout_s: float) -> None:
    """Wait for the report that the environment is loaded. Raises BrokenEnvironment."""
    try:
        async with asyncio.timeout(timeout_s):
            packet = await asyncio.get_running_loop().sock_recv(control, _PACKET_BYTES)
    except TimeoutError:
        text = f"loading the environment took longer than {timeout_s:g} s\n{output.text()}"
        raise BrokenEnvironment(text.rstrip()) from None
    except OSError:
        packet = b""
    report = {"report": "broken", "text": "the process died while it loaded the environment"}
    try:
        if packet:
            report = json.loads(packet)
        broken = report["report"] == "broken"
        text = str(report["text"]) if broken else ""
    except NO_REPORT as error:
        raise BrokenEnvironment(f"what loads the environment said what is no report: {type(error).__name__}") from error
    if broken:
        raise BrokenEnvironment(f"{text}\n{output.text()}".rstrip())

"""The supervisor's handle of its fork server: starts it when needed, sends orders, receives reports, forks and kills children, stops it.

It uses processes and pipes, and knows neither the bus nor episodes. `server_start` makes a server. Reports are validated, because the
fork server has imported environment code, and in another container may be any program.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from marlaas_api.errors import MarlaasError, Permanent, Retryable
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.channel import MAX_FRAME_BYTES
from marlaas_worker.sandbox.output import Output

PACKET_BYTES = 64 << 10
_STACK_S = 2.0
"""Time that a child has to print its stack. With a low CPU share on a busy machine, this takes long."""
_OUTERMOST_FRAME = b"in _run_module_as_main"
_BUSY_S = 0.01
_END_S = 10.0
_SILENCE_S = 30.0
"""Time without any report, while a killed child's end is due, after which the fork server is killed.

On a machine with a load of 32, a healthy fork server was silent for more than ten seconds.
"""
_MAX_EXTENSIONS = 4
_REMEMBERED_S = 5.0
"""Seconds for which a failed load of the environment is raised again without another load."""

INVALID_REPORT = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""Exceptions raised by malformed reports. Deeply nested JSON raises RecursionError, which is not a ValueError."""

log = logging.getLogger(__name__)


class BrokenEnvironment(Permanent):
    """The environment could not be imported or created; the text is its traceback or the reason.

    Attributes:
        is_permanent: the environment does not fit the job, so loading it again cannot help.
        fault: class of the fault of the episodes that need this environment.
    """

    def __init__(self, text: str, *, is_permanent: bool = False, fault: FaultClass = FaultClass.ENV) -> None:
        super().__init__(text)
        self.is_permanent = is_permanent
        self.fault = fault


class ForkServerLost(Retryable):
    """The fork server exited, and with it every child; or no fork server could be reached; or no process could be created."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a child.

    Attributes:
        status: exit status; -N if signal N killed the child; None if unknown.
        cause: why the fork server killed the child: `order`, `memory` (over the limit) or `processes` (too many). If `status` is None, how
            the child was lost. Else empty.
    """

    status: int | None
    cause: str = ""


@dataclass(slots=True)
class Child:
    """The supervisor's handle of one episode's process.

    Attributes:
        number: its number in orders to the fork server.
        reader, writer: the two directions of the connection to the process.
        output: what the process prints.
        server: the fork server that forks and kills it.
        ended: resolves once its exit is reported, or its fork server has exited.
    """

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: Output
    server: "Server"
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def kill(self) -> None:
        """Kill the process and all its descendants; return when they are gone. If the fork server reports no end, kill the fork server."""
        with contextlib.suppress(ForkServerLost):
            if not self.ended.done():
                await self.server.order("kill", self.number)
        heard = -1
        for _ in range(_MAX_EXTENSIONS):  # On a busy machine many ends take long.
            if self.ended.done() or heard == self.server.num_reports:
                break
            heard = self.server.num_reports
            await asyncio.wait({self.ended}, timeout=_SILENCE_S)
        if not self.ended.done():
            log.warning("the fork server does not report an episode's end: it is killed, with all its episodes")
            self.server.kill()
            await asyncio.wait({self.ended})

    async def print_stack(self) -> None:
        """Make the child print its stack into `output`, if it still can; return once it has, or after `_STACK_S`."""
        with contextlib.suppress(ForkServerLost):
            await self.server.order("stack", self.number)
        await self.output.wait_for_text(_OUTERMOST_FRAME, _STACK_S)

    def close(self) -> None:
        """Close the connection to the child and its output."""
        self.writer.close()
        self.output.close()


class ServerProcess(Protocol):
    """Process of a fork server, in this container or in another (`server_start`)."""

    async def ended(self) -> None:
        """Wait until the process has exited. Call it after `kill`, or once the control socket is closed."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...

    def kill_children(self, pids: Iterable[int]) -> None:
        """After the fork server's exit, kill those of its children that still run. pids: process ids of its children."""
        ...


class Server:
    """A running fork server and its children.

    Args:
        process: the fork server's process.
        control: connection for orders and reports.

    Attributes:
        output: what the fork server prints.
        told: warnings about the environment's load (`server_start.Loaded`).
        data_digest: one SHA-256 for all data sets that it has loaded; empty: none.
        pids: process ids of the running children, by number.
        children: children whose end is not reported yet, by number.
        num_reports: reports of starts and ends of children so far.
        lost: set once the fork server has exited.
    """

    def __init__(
        self,
        process: ServerProcess,
        control: socket.socket,
        output: Output,
        told: tuple[str, ...] = (),
        data_digest: str = "",
    ) -> None:
        self.output, self.told, self.data_digest = output, told, data_digest
        self.pids: dict[int, int] = {}
        self.children: dict[int, Child] = {}
        self.num_reports = 0
        self.lost = asyncio.Event()
        self._process = process
        self._control = control
        self._listening = asyncio.create_task(self._listen(), name="sandbox fork server reports")

    @property
    def is_lost(self) -> bool:
        """Whether it has exited."""
        return self.lost.is_set()

    async def order(self, order: str, number: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order; wait while the server's queue of orders is full. Raises ForkServerLost.

        Args:
            order: `fork`, `kill`, or `stack` (the child prints its stack).
            number: of the child.
            descriptors: for `fork`: the child's end of the connection, and the write end of its output.
        """
        packet = json.dumps({"order": order, "number": number}).encode()
        while not self.is_lost:
            try:
                socket.send_fds(self._control, [packet], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(_BUSY_S)
            except OSError as error:
                raise ForkServerLost(f"cannot send an order to the fork server: {error}") from error
        raise ForkServerLost("the fork server has ended")

    def kill(self) -> None:
        """Kill a server that does not respond; its children end with it."""
        self._process.kill()

    async def end(self) -> None:
        """Close the control socket, so that the server kills its children and exits. Kill the server if it still runs after `_END_S`."""
        self._listening.cancel()
        # Wait before closing the descriptor: the loop would otherwise keep reading from the next file with its number.
        await asyncio.wait({self._listening})
        self._control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.ended()
        except TimeoutError:
            self.kill()
            await self._process.ended()
        self._mark_lost()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while packet := await loop.sock_recv(self._control, PACKET_BYTES):
                self._on_report(json.loads(packet))
        except OSError:
            pass
        except INVALID_REPORT as error:
            log.warning("the fork server sent an invalid report: %s: %s", type(error).__name__, error)
            self.kill()
        await self._process.ended()
        self._mark_lost()

    def _on_report(self, report: dict[str, Any]) -> None:
        self.num_reports += 1
        number = int(report["number"])
        if report["report"] == "forked":
            self.pids[number] = int(report["pid"])
            return
        self.pids.pop(number, None)
        ended = _ended(report)
        child = self.children.pop(number, None)
        if child is not None and not child.ended.done():
            child.ended.set_result(ended)

    def _mark_lost(self) -> None:
        """Mark the server as lost, kill the remains of its children, and resolve their `ended`."""
        self.lost.set()
        self._process.kill_children(self.pids.values())
        self.pids.clear()
        for child in self.children.values():
            if not child.ended.done():
                child.ended.set_result(Ended(None, "fork server"))
        self.children.clear()
        self._control.close()
        self.output.close()


def _ended(report: Mapping[str, Any]) -> Ended:
    """Parse the report of a child's end. Raises one of INVALID_REPORT."""
    status, cause = report["status"], str(report["cause"])
    if status is None:
        return Ended(None, cause)
    if status < 0:
        signal.Signals(-status)
    return Ended(int(status), cause)


class Children:
    """Forks child processes for episodes; starts the fork server when needed, and another if it was lost.

    Args:
        start: returns a new fork server that has loaded the environment; raises BrokenEnvironment, ForkServerLost.

    Attributes:
        loaded: set once a fork server has loaded the environment for the first time.
    """

    def __init__(self, start: Callable[[], Awaitable[Server]]) -> None:
        self._start_server = start
        self._server: Server | None = None
        self._starting = asyncio.Lock()
        self._broken: tuple[float, BrokenEnvironment] | None = None
        self._num_forked = 0
        self._untold: tuple[str, ...] = ()
        self.loaded = asyncio.Event()

    @contextlib.asynccontextmanager
    async def child(self) -> AsyncIterator[Child]:
        """Fork a child and yield it. Leaving the context kills the child and all its descendants, and waits until they are gone.

        Raises:
            BrokenEnvironment: the environment cannot be loaded; raised again without a retry for a few seconds.
            ForkServerLost: the fork server has just ended, or the machine has no room for a process; retry.
        """
        try:
            child = await self._fork(await self._running())
        except OSError as error:
            raise ForkServerLost(f"cannot start a process: {error}") from error
        try:
            yield child
        finally:
            try:
                await asyncio.shield(child.kill())
            finally:  # close the pipes even if a second cancellation interrupts the kill
                child.close()

    @property
    def are_ready(self) -> bool:
        """Whether a fork server runs that has loaded the environment."""
        return self._server is not None and not self._server.is_lost

    @property
    def data_digest(self) -> str:
        """One SHA-256 for all data sets that the fork server has loaded; empty: it has loaded none, or there is no fork server now."""
        return "" if self._server is None else self._server.data_digest

    async def warm_up(self) -> None:
        """Load the environment before the first task, and again whenever the fork server was lost; until cancelled."""
        while True:
            try:
                server = await self._running()
                await server.lost.wait()
            except (MarlaasError, OSError) as error:
                log.warning("the environment is not loaded: %s", error)
                await asyncio.sleep(_REMEMBERED_S)

    async def close(self) -> None:
        """Stop the fork server and every child."""
        if self._server is not None:
            await self._server.end()
            self._server = None

    async def _fork(self, server: Server) -> Child:
        self._num_forked += 1
        number = self._num_forked
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_FRAME_BYTES)
            child = server.children[number] = Child(number, reader, writer, Output(output_read), server)
            await self._order_fork(child, (theirs.fileno(), output_write))
            return child
        finally:
            theirs.close()
            os.close(output_write)

    async def _order_fork(self, child: Child, descriptors: tuple[int, int]) -> None:
        try:
            await child.server.order("fork", child.number, descriptors)
        except BaseException:
            child.server.children.pop(child.number, None)
            child.close()
            raise

    async def _running(self) -> Server:
        async with self._starting:
            if self._server is not None and self._server.is_lost:
                log.warning("the fork server was lost; starting another: %s", self._server.output.text())
                self._server = None
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> Server:
        now = asyncio.get_running_loop().time()
        if self._broken is not None and now - self._broken[0] < _REMEMBERED_S:
            raise self._broken[1]
        try:
            server = await self._start_server()
        except BrokenEnvironment as error:
            self._broken = (asyncio.get_running_loop().time(), error)
            raise
        for sentence in server.told:
            log.warning("%s", sentence)
        self._untold = server.told
        self.loaded.set()
        return server

    def take_told(self) -> tuple[str, ...]:
        """Return the warnings about the last load (`server_start.Loaded.told`) and drop them: further calls before the next load return none."""
        told, self._untold = self._untold, ()
        return told

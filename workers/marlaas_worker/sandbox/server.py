"""One fork server process as the supervisor holds it: start, give orders, hear how children ended, end.

Knows processes and pipes; knows neither the bus nor what an episode is.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.sandbox.output import Output

_PACKET_BYTES = 64 << 10
_STACK_S = 0.5
_OUTERMOST_FRAME = b"in _run_module_as_main"
_BUSY_S = 0.01
_END_S = 10.0


class BrokenEnvironment(Permanent):
    """The environment could not be imported or made; the text is its traceback or says what is wrong."""


class ForkServerLost(Retryable):
    """The fork server ended by itself, and with it every child; or the machine has no room for a process."""


@dataclass(frozen=True, slots=True)
class ChildrenConfig:
    """What runs in the children. load_timeout_s: for importing and making the environment. scratch: a folder for temporary files."""

    name: str
    args: Mapping[str, Any]
    memory_bytes: int
    load_timeout_s: float
    scratch: Path
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: exit status (negative: signal; None: unknown) and the fork server's reason for killing it, if it did."""

    status: int | None
    cause: str = ""


@dataclass(slots=True)
class Child:
    """One episode's process. `ended` resolves when it is gone."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: Output
    server: "Server"
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def kill(self) -> None:
        """Kill it and all that it started; returns when it is gone."""
        with contextlib.suppress(ForkServerLost):
            if not self.ended.done():
                await self.server.order("kill", self.number)
        await asyncio.wait({self.ended}, timeout=_END_S)
        if not self.ended.done():
            self.server.condemn()
            await self.ended

    async def print_stack(self) -> None:
        """Make it print where it is, if it still can."""
        with contextlib.suppress(ForkServerLost):
            await self.server.order("stack", self.number)
        await self.output.mentions(_OUTERMOST_FRAME, _STACK_S)

    def close(self) -> None:
        """Let go of its pipes."""
        self.writer.close()
        self.output.close()


class Server:
    """One fork server process."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, output: Output) -> None:
        self.output = output
        self.pids: dict[int, int] = {}
        self.children: dict[int, Child] = {}
        self.is_lost = False
        self._process = process
        self._control = control
        self._listening = asyncio.create_task(self._listen(), name="sandbox fork server reports")

    async def order(self, order: str, number: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send an order, waiting while the server has too many before it. Raises ForkServerLost."""
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
        """Kill a server that no longer obeys; its children go with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Close the control socket, upon which it kills its children and ends; kill it when it does not."""
        self._listening.cancel()
        self._control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self.condemn()
            await self._process.wait()
        self._lose()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while packet := await loop.sock_recv(self._control, _PACKET_BYTES):
                self._hear(json.loads(packet))
        await self._process.wait()
        self._lose()

    def _hear(self, report: dict[str, Any]) -> None:
        number = report["number"]
        if report["report"] == "forked":
            self.pids[number] = report["pid"]
            return
        self.pids.pop(number, None)
        child = self.children.pop(number, None)
        if child is not None and not child.ended.done():
            child.ended.set_result(Ended(report["status"], report["cause"]))

    def _lose(self) -> None:
        """Everything of this server is gone; kill what its children may have started."""
        self.is_lost = True
        for pid in self.pids.values():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self.pids.clear()
        for child in self.children.values():
            if not child.ended.done():
                child.ended.set_result(Ended(None, "fork server"))
        self.children.clear()
        self._control.close()
        self.output.close()


async def start_server(config: ChildrenConfig) -> Server:
    """Start a fork server and wait until it has loaded the environment. Raises BrokenEnvironment."""
    shutil.rmtree(config.scratch, ignore_errors=True)
    config.scratch.mkdir(parents=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    output_read, output_write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "marlaas_worker.sandbox.forkserver", str(theirs.fileno())),
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
    return Server(process, ours, output)


async def _loaded(
    process: asyncio.subprocess.Process, control: socket.socket, output: Output, config: ChildrenConfig
) -> None:
    """Hand over the configuration and wait for the word that the environment is loaded. Raises BrokenEnvironment."""
    assert process.stdin is not None
    setup = {
        "name": config.name,
        "args": config.args,
        "memory_bytes": config.memory_bytes,
        "scratch": str(config.scratch),
    }
    try:
        async with asyncio.timeout(config.load_timeout_s):
            process.stdin.write(json.dumps(setup).encode())
            process.stdin.close()
            packet = await asyncio.get_running_loop().sock_recv(control, _PACKET_BYTES)
    except TimeoutError:
        raise BrokenEnvironment(
            f"loading the environment took longer than {config.load_timeout_s:g} s\n{output.text()}".rstrip()
        ) from None
    report = (
        json.loads(packet)
        if packet
        else {"report": "broken", "text": "the process died while it loaded the environment"}
    )
    if report["report"] == "broken":
        raise BrokenEnvironment(f"{report['text']}\n{output.text()}".rstrip())

"""Child processes for episodes, and the fork server that forks them."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from marlaas_api.errors import MarlaasError
from marlaas_worker.sandbox.channel import MAX_FRAME_BYTES
from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import BrokenEnvironment, Child, ForkServerLost, Server

_REMEMBERED_S = 5.0

log = logging.getLogger(__name__)


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
        """Return the warnings about the last load (`Loaded.told`) and drop them: further calls before the next load return none."""
        told, self._untold = self._untold, ()
        return told

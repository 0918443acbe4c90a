"""The process of a fork server: started by exec, forked by the template, or in an environment's own container.

Process ids of another container are meaningless here: children are reached only by orders, and closing the connection kills
them all.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LocalServerProcess:
    """A fork server that the supervisor started by exec; it leads a session."""

    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def ended(self) -> None:
        await self.process.wait()

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_children(self, pids: Iterable[int]) -> None:
        kill_groups(pids)


@dataclass(frozen=True, slots=True, eq=False)
class ForkedServerProcess:
    """A fork server that the template forked. descriptor: of the process; it is closed when the process has exited."""

    pid: int
    descriptor: int
    exited: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        asyncio.get_running_loop().add_reader(self.descriptor, self._on_exit)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.descriptor)
        os.close(self.descriptor)
        self.exited.set_result(None)

    async def ended(self) -> None:
        await asyncio.shield(self.exited)

    def kill(self) -> None:
        """Kill it; the template then kills its process group."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def kill_children(self, pids: Iterable[int]) -> None:
        kill_groups(pids)


@dataclass(frozen=True, slots=True)
class RemoteServerProcess:
    """A fork server in another container; it counts as exited when the connection closes."""

    control: socket.socket

    async def ended(self) -> None:
        return

    def kill(self) -> None:
        """Close the connection, upon which the other side kills its children. Their end cannot be observed."""
        try:
            self.control.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def kill_children(self, pids: Iterable[int]) -> None:
        return


def kill_groups(pids: Iterable[int]) -> None:
    """Kill the process groups of episodes whose fork server has exited."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)

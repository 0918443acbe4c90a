"""The process of a fork server: started by exec, or in an environment's own container.

Process ids of another container mean nothing here. The children there are reached only by orders, and closing the connection
kills them all.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class LocalServerProcess:
    """`ServerProcess` of a fork server that the supervisor started by exec.

    process: the fork server's process, which leads a session and a process group.
    """

    process: asyncio.subprocess.Process
    _is_swept: bool = False

    async def ended(self) -> None:
        """Wait until the fork server has exited, then kill the rest of its process group: the environment's load may have started processes."""
        await self.process.wait()
        if not self._is_swept:
            self._is_swept = True
            kill_groups((self.process.pid,))

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_children(self, pids: Iterable[int]) -> None:
        kill_groups(pids)


@dataclass(frozen=True, slots=True)
class RemoteServerProcess:
    """`ServerProcess` of a fork server in another container, which counts as exited once the connection is closed.

    control: connection to the fork server.
    """

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
    """Kill the process groups whose leaders have these process ids: children of a fork server that has exited, or the fork server's own group."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)

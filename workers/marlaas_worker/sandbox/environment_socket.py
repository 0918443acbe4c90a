"""Connection to a fork server in another container: connect, send the configuration, close.

Process ids of the other container are meaningless here: children are reached only by orders, and closing the
connection kills them all. The other container may restart at any time; then the supervisor connects again.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import BrokenEnvironment, ChildrenConfig, ForkServerLost, Server, loaded

_RETRY_S = 0.2


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

    def reap(self, pids: Iterable[int]) -> None:
        return


async def connect_server(config: ChildrenConfig, path: Path) -> Server:
    """Connect, and wait until the environment is loaded.

    Raises:
        ForkServerLost: no server accepts the connection within the load timeout.
        BrokenEnvironment: the environment cannot be imported or created, or the socket is not an environment
            server's.
    """
    control = await _connected(path, config.load_timeout_s)
    output = _nothing_to_hear()
    try:
        _hand_over(control, config)
        await loaded(control, output, config.load_timeout_s)
    except OSError as error:
        control.close()
        raise ForkServerLost(f"the environment's container hung up: {error}") from error
    except BaseException:
        control.close()
        raise
    return Server(RemoteServerProcess(control), control, output)


async def _connected(path: Path, timeout_s: float) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            control.connect(str(path))
            return control
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            control.close()
            if asyncio.get_running_loop().time() >= deadline:
                raise ForkServerLost(
                    f"the environment's container does not listen on {path} ({error.strerror}); its log says why"
                ) from error
        except OSError as error:  # the environment may have put another kind of socket there, or a closed one
            control.close()
            raise BrokenEnvironment(f"what is at {path} is no server of environments: {error.strerror}") from error
        await asyncio.sleep(_RETRY_S)


def _hand_over(control: socket.socket, config: ChildrenConfig) -> None:
    """Send the configuration as a file descriptor: a packet's size is limited, arguments are not."""
    setup = json.dumps({"args": config.args, "memory_bytes": config.memory_bytes}).encode()
    descriptor = os.memfd_create("configuration")
    try:
        os.write(descriptor, setup)
        os.lseek(descriptor, 0, os.SEEK_SET)
        socket.send_fds(control, [b"configuration"], [descriptor])
    finally:
        os.close(descriptor)


def _nothing_to_hear() -> Output:
    """Return an empty output: the other container prints to its own log."""
    readable, writable = os.pipe()
    os.close(writable)
    return Output(readable)

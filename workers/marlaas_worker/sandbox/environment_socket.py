"""A fork server that runs in another container, as the supervisor holds it: connect, hand over the configuration, let go.

Process ids mean nothing here: orders are all that reaches a child, and closing the connection is what ends them all. The other container may
restart at any time; its socket is then looked for again.
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
    """A fork server of another container; it is gone when the connection is."""

    control: socket.socket

    async def ended(self) -> None:
        return

    def kill(self) -> None:
        """Hang up: the other side then kills its children. That it did cannot be seen from here."""
        try:
            self.control.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def reap(self, pids: Iterable[int]) -> None:
        return


async def connect_server(config: ChildrenConfig, path: Path) -> Server:
    """Connect, and wait until the environment is loaded.

    Raises:
        ForkServerLost: nobody listens there within the time for loading.
        BrokenEnvironment: the environment cannot be imported or made, or what is there is no server of environments.
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
        except OSError as error:  # the folder is the environment's too: a socket of another kind, or one closed to us
            control.close()
            raise BrokenEnvironment(f"what is at {path} is no server of environments: {error.strerror}") from error
        await asyncio.sleep(_RETRY_S)


def _hand_over(control: socket.socket, config: ChildrenConfig) -> None:
    """The configuration travels as a file: a packet is bounded, arguments are not."""
    setup = json.dumps({"args": config.args, "memory_bytes": config.memory_bytes}).encode()
    descriptor = os.memfd_create("configuration")
    try:
        os.write(descriptor, setup)
        os.lseek(descriptor, 0, os.SEEK_SET)
        socket.send_fds(control, [b"configuration"], [descriptor])
    finally:
        os.close(descriptor)


def _nothing_to_hear() -> Output:
    """What that container prints is in its own log."""
    readable, writable = os.pipe()
    os.close(writable)
    return Output(readable)

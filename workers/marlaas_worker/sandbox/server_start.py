"""The ways to a fork server: have it forked by the template, start it by exec, or connect to the one in an environment's own container.

The other container may restart at any time; then the supervisor connects again.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlaas_api.cpu_shares import LOW_SHARE, set_share
from marlaas_worker.sandbox.kernel import cpu_wait_ns
from marlaas_worker.sandbox.load_report import wait_until_loaded
from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import PACKET_BYTES, BrokenEnvironment, ForkServerLost, Server
from marlaas_worker.sandbox.server_processes import ForkedServerProcess, LocalServerProcess, RemoteServerProcess

FULL_SHARE_S = 3.0
"""Longest time in which an environment is loaded with a full share of the CPU."""
_LOCK = Path(tempfile.gettempdir()) / f"marlaas-{os.getuid()}-loading.lock"
BEGIN_S = 10.0
"""Longest wait for the template to fork."""
_RETRY_S = 0.2
_SHARE_TRIES = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildrenConfig:
    """Configuration of the child processes.

    Attributes:
        name, args: the environment and its arguments.
        load_timeout_s: limit of importing and creating the environment; `wait_until_loaded` extends it while the CPU is busy.
        scratch: folder for temporary files.
        variables: environment variables of the fork server.
        secluded: path that no child may read (`seclusion`); None: no path.
        given: more variables, set after the process is secluded.
        agents: names of the job's agents.
        demonstrations: see `demonstrations.with_data`.
        modules: folder in which the environment's modules are searched first; None: only on PYTHONPATH.
        template: takes requests for fork servers (`template`); None: each is started by exec.
    """

    name: str
    args: Mapping[str, Any]
    memory_bytes: int
    load_timeout_s: float
    scratch: Path
    variables: Mapping[str, str]
    secluded: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    template: socket.socket | None = None
    agents: tuple[str, ...] = ("policy",)
    modules: Path | None = None
    demonstrations: Mapping[str, Any] | None = None


async def start_server(config: ChildrenConfig) -> Server:
    """Start a fork server and wait until it has loaded the environment. Raises BrokenEnvironment."""
    shutil.rmtree(config.scratch, ignore_errors=True)
    config.scratch.mkdir(parents=True)
    ends, process = await _begun(config)
    ours, output = ends.ours, Output(ends.printed)
    report = wait_until_loaded(ours, output, config.load_timeout_s, lambda: cpu_wait_ns(process.pid) / 1e9)
    loading = asyncio.create_task(report, name="load the environment")
    try:
        with loads_alone() as alone:
            await asyncio.wait({loading}, timeout=FULL_SHARE_S if alone else 0.0)
        if not loading.done():
            await _lower_share(process.pid)
        told = await loading
    except BaseException:
        loading.cancel()
        ours.close()
        process.kill()
        await process.ended()
        output.close()
        raise
    return Server(process, ours, output, told)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Both ends of the control connection of a fork server, and of its output."""

    ours: socket.socket
    theirs: socket.socket
    printed: int
    output: int

    @classmethod
    def open(cls) -> "_Ends":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours, theirs, *os.pipe())

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Close the fork server's ends when the context ends, and ours too if it fails."""
        try:
            yield
        except BaseException:
            self.ours.close()
            os.close(self.printed)
            raise
        finally:
            self.theirs.close()
            os.close(self.output)


async def _begun(config: ChildrenConfig) -> tuple[_Ends, LocalServerProcess | ForkedServerProcess]:
    """Have a fork server forked by the template, or start one by exec if there is none, or it does not fork."""
    setup = {
        **_setup(config),
        "name": config.name,
        "scratch": str(config.scratch),
        "secluded": str(config.secluded) if config.secluded is not None else None,
        "given": dict(config.given),
        "modules": str(config.modules) if config.modules is not None else None,
    }
    with _in_memory(setup) as configuration:
        if config.template is not None:
            ends = _Ends.open()
            try:
                return ends, await _forked(config.template, ends, configuration)
            except (OSError, ValueError) as error:
                log.warning("the template of fork servers forks none, so this one is started by exec: %s", error)
        ends = _Ends.open()
        with ends.given():
            return ends, await _executed(config, ends, configuration)


async def _forked(template: socket.socket, ends: _Ends, configuration: int) -> ForkedServerProcess:
    """Have the template fork a fork server. Raises OSError, ValueError. If it forks later, the process ends at once."""
    with ends.given():
        socket.send_fds(template, [b"fork"], (ends.theirs.fileno(), ends.output, configuration))
        ends.theirs.close()  # if the template cannot fork, the connection now ends
        await _readable(ends.ours)
        packet, (descriptor,), _, _ = socket.recv_fds(ends.ours, PACKET_BYTES, 1)
        return ForkedServerProcess(int(json.loads(packet)["pid"]), descriptor)


async def _readable(connection: socket.socket) -> None:
    """Wait until a packet or the end of a connection can be read. Raises TimeoutError."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        async with asyncio.timeout(BEGIN_S):
            await readable.wait()
    finally:
        loop.remove_reader(connection)


async def _executed(config: ChildrenConfig, ends: _Ends, configuration: int) -> LocalServerProcess:
    process = await asyncio.create_subprocess_exec(
        # -s: earlier episodes could write below HOME, and this process is not secluded yet.
        *(sys.executable, "-P", "-s", "-m", "marlaas_worker.sandbox.forkserver", str(ends.theirs.fileno())),
        stdin=configuration,
        stdout=ends.output,
        stderr=ends.output,
        pass_fds=(ends.theirs.fileno(),),
        env=dict(config.variables),
        start_new_session=True,
    )
    return LocalServerProcess(process)


@contextlib.contextmanager
def loads_alone() -> Iterator[bool]:
    """Yield whether no other process of this user on this machine is in this context.

    One environment at a time is loaded with a full share of the CPU. With its low share, a new job's would take seconds
    beside 30 busy jobs. If all of a hundred new jobs had a full share, the engine would stand still.
    """
    try:
        descriptor = os.open(_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(descriptor)


async def _lower_share(pid: int) -> None:
    """Lower the CPU share of a fork server that loads, so that it does not take the engine's and the trainer's. It sets its later share itself."""
    for _ in range(_SHARE_TRIES):
        if set_share(pid, LOW_SHARE):
            return
        await asyncio.sleep(_RETRY_S)
    log.info("the kernel has no CPU shares of sessions, or does not let this user change them; niceness alone applies")


async def connect_server(config: ChildrenConfig, path: Path) -> Server:
    """Connect, and wait until the environment is loaded.

    Raises:
        ForkServerLost: no server accepts the connection within the load timeout.
        BrokenEnvironment: the environment cannot be imported or created, or the socket is not an environment
            server's.
    """
    control = await _connect(path, config.load_timeout_s)
    output = _empty_output()
    try:
        _send_config(control, config)
        told = await wait_until_loaded(control, output, config.load_timeout_s)
    except OSError as error:
        control.close()
        raise ForkServerLost(f"the environment's container closed the connection: {error}") from error
    except BaseException:
        control.close()
        raise
    return Server(RemoteServerProcess(control), control, output, told)


async def _connect(path: Path, timeout_s: float) -> socket.socket:
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
            raise BrokenEnvironment(f"{path} is not the socket of an environment server: {error.strerror}") from error
        await asyncio.sleep(_RETRY_S)


def _send_config(control: socket.socket, config: ChildrenConfig) -> None:
    """Send the configuration as a file descriptor: a packet's size is limited, arguments are not."""
    with _in_memory(_setup(config)) as descriptor:
        socket.send_fds(control, [b"configuration"], [descriptor])


def _setup(config: ChildrenConfig) -> dict[str, Any]:
    """Return the part of the configuration that every fork server reads."""
    setup = {"args": config.args, "agents": config.agents, "memory_bytes": config.memory_bytes}
    return setup if config.demonstrations is None else setup | {"demonstrations": config.demonstrations}


@contextlib.contextmanager
def _in_memory(setup: Mapping[str, Any]) -> Iterator[int]:
    """Yield the descriptor of a file in memory with this JSON."""
    descriptor = os.memfd_create("configuration")
    try:
        os.write(descriptor, json.dumps(setup).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _empty_output() -> Output:
    """Return an empty output: the other container prints to its own log."""
    readable, writable = os.pipe()
    os.close(writable)
    return Output(readable)

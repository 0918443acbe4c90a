"""Two ways to get a fork server: start it by exec, or connect to the one in an environment's own container; then wait until it has loaded.

The other container may restart at any time; then the supervisor connects again. Process ids of another container mean nothing here. The
children there are reached only by orders, and closing the connection kills them all.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlaas.envs.leftovers import MAX_CHARACTERS, MAX_TOLD
from marlaas_api.cpu_shares import LOW_SHARE, set_share_soon
from marlaas_api.last_words import visible
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.kernel import cpu_wait_ns
from marlaas_worker.sandbox.output import Output
from marlaas_worker.sandbox.server import INVALID_REPORT, PACKET_BYTES, BrokenEnvironment, ForkServerLost, Server

FULL_SHARE_S = 3.0
"""Time from its start for which a fork server that loads an environment has a full CPU share."""
_RETRY_S = 0.2
_FAULTS = {fault.value: fault for fault in (FaultClass.INFRA, FaultClass.WAITED)}
_DIGEST = re.compile("[0-9a-f]{64}")
MAX_EXTENSION = 10
"""Longest load time, as a multiple of the limit."""
_SHORT_OF_CPU = 0.5
"""Least fraction of the time that a process must wait for a CPU to count as short of CPU."""


@dataclass(frozen=True, slots=True)
class ChildrenConfig:
    """Configuration of a fork server and its child processes.

    Attributes:
        name: the environment, as `module:attribute` or a builtin's name; empty if it has its own image, whose container names it.
        args: arguments of the environment.
        memory_bytes: limit of the memory in use of one episode.
        load_timeout_s: limit of importing and creating the environment; `wait_until_loaded` extends it while the CPU is busy.
        scratch: folder for temporary files.
        variables: environment variables of the fork server.
        secluded: path that no child may read (`seclusion`); None: no path.
        given: more environment variables, set after access to `secluded` is denied. They carry the job's secrets.
        agents: names of the agents that the environment calls.
        demonstrations: arguments of the data sets of demonstrations, by agent (`demonstrations.with_data`); None: the demonstrations of
            the environment itself, if it has any.
        suites: `name` and `args` of the environment of each evaluation suite that has its own, by suite.
        modules: folder in which the environment's modules are searched first; None: only on PYTHONPATH.
    """

    name: str
    args: Mapping[str, Any]
    memory_bytes: int
    load_timeout_s: float
    scratch: Path
    variables: Mapping[str, str]
    secluded: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    agents: tuple[str, ...] = ("policy",)
    modules: Path | None = None
    demonstrations: Mapping[str, Any] | None = None
    suites: Mapping[str, Any] = field(default_factory=dict)


async def start_server(config: ChildrenConfig) -> Server:
    """Start a fork server and wait until it has loaded the environment. Raises BrokenEnvironment."""
    # Other jobs' sandboxes may run in this process, and what episodes have left may be large.
    await asyncio.to_thread(shutil.rmtree, config.scratch, ignore_errors=True)
    config.scratch.mkdir(mode=0o700, parents=True)
    started, ours, output = await _started(config)
    process = LocalServerProcess(started)
    report = wait_until_loaded(
        ours, output, config.load_timeout_s, lambda: cpu_wait_ns(started.pid) / 1e9, config.suites
    )
    loading = asyncio.create_task(report, name="load the environment")
    try:
        await asyncio.wait({loading}, timeout=FULL_SHARE_S)
        if not loading.done():
            # After the load, the fork server sets its share itself.
            await set_share_soon(started.pid, LOW_SHARE)
        found = await loading
    except BaseException:
        loading.cancel()
        ours.close()
        process.kill()
        await process.ended()
        output.close()
        raise
    return Server(process, ours, output, found.told, found.data_digest)


async def _started(config: ChildrenConfig) -> tuple[asyncio.subprocess.Process, socket.socket, Output]:
    """Start a fork server; return its process, the supervisor's end of the control connection, and the fork server's output."""
    setup = {
        **_setup(config),
        "name": config.name,
        "scratch": str(config.scratch),
        "secluded": str(config.secluded) if config.secluded is not None else None,
        "given": dict(config.given),
        "modules": str(config.modules) if config.modules is not None else None,
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    printed, output = os.pipe()
    try:
        with _in_memory(setup) as configuration:
            process = await asyncio.create_subprocess_exec(
                # -s: earlier episodes could write below HOME, and this process is not secluded yet.
                *(sys.executable, "-P", "-s", "-m", "marlaas_worker.sandbox.forkserver", str(theirs.fileno())),
                stdin=configuration,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=dict(config.variables),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        os.close(printed)
        raise
    finally:
        theirs.close()
        os.close(output)
    return process, ours, Output(printed)


async def connect_server(config: ChildrenConfig, path: Path) -> Server:
    """Connect to the environment server that listens on the socket `path`, and wait until it has loaded the environment.

    Raises:
        ForkServerLost: no server accepts the connection within the load timeout.
        BrokenEnvironment: the environment cannot be imported or created, or the socket is not an environment
            server's.
    """
    control = await _connect(path, config.load_timeout_s)
    output = _empty_output()
    try:
        _send_config(control, config)
        found = await wait_until_loaded(control, output, config.load_timeout_s, suites=config.suites)
    except OSError as error:
        control.close()
        raise ForkServerLost(f"the environment's container closed the connection: {error}") from error
    except BaseException:
        control.close()
        raise
    return Server(RemoteServerProcess(control), control, output, found.told, found.data_digest)


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
    """Return the part of the configuration that fork servers in this container and in an environment's own container read."""
    setup: dict[str, Any] = {"args": config.args, "agents": config.agents, "memory_bytes": config.memory_bytes}
    setup |= {} if config.demonstrations is None else {"demonstrations": config.demonstrations}
    return setup | ({"suites": config.suites} if config.suites else {})


@contextlib.contextmanager
def _in_memory(setup: Mapping[str, Any]) -> Iterator[int]:
    """Yield the descriptor of a file in memory that contains `setup` as JSON."""
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """Report of a fork server that has loaded its environments.

    Attributes:
        told: warnings about the load, one sentence each.
        data_digest: one SHA-256 for all data sets that were loaded; empty: none.
    """

    told: tuple[str, ...] = ()
    data_digest: str = ""


async def wait_until_loaded(
    control: socket.socket,
    output: Output,
    timeout_s: float,
    cpu_wait_s: Callable[[], float] | None = None,
    suites: Collection[str] = (),
) -> Loaded:
    """Wait for the report that the environment is loaded.

    Args:
        control: connection to the fork server.
        output: of the fork server, for the text of the error.
        timeout_s: limit. It is extended, to at most `MAX_EXTENSION` times itself, while the process is short of CPU: with a low share
            of a busy CPU, imports take many times as long.
        cpu_wait_s: returns the seconds that the process has waited for a CPU so far; None: unknown, the limit is not extended.
        suites: names of the suites whose own environments the fork server must have loaded, besides the job's.

    Raises:
        BrokenEnvironment: the environment cannot be loaded, or not in time, or the report is invalid or lacks one of `suites`.
    """
    packet = await _report(control, output, timeout_s, cpu_wait_s or (lambda: 0.0))
    report: dict[str, Any] = {"report": "broken", "text": "the process exited while it loaded the environment"}
    try:
        if packet:
            report = json.loads(packet)
        broken = report["report"] == "broken"
        text, is_permanent = (str(report["text"]), report.get("is_permanent") is True) if broken else ("", False)
        loaded = {str(one) for one in report.get("suites", ())}
        data = str(report.get("data", ""))
        told = tuple(visible(str(one))[:MAX_CHARACTERS] for one in list(report.get("told", ()))[:MAX_TOLD])
    except INVALID_REPORT as error:
        raise BrokenEnvironment(
            f"the process that loads the environment sent an invalid report: {type(error).__name__}"
        ) from error
    if broken:
        fault = _FAULTS.get(str(report.get("fault")), FaultClass.ENV)
        raise BrokenEnvironment(f"{text}\n{output.text()}".rstrip(), is_permanent=is_permanent, fault=fault)
    if missing := set(suites) - loaded:
        raise BrokenEnvironment(
            f"the release of marlaas in the environment's image does not play suites with an environment of their own ({min(missing)}): build "
            "the image from the worker image of this release",
            is_permanent=True,
        )
    return Loaded(told, data if _DIGEST.fullmatch(data) else "")


async def _report(control: socket.socket, output: Output, timeout_s: float, cpu_wait_s: Callable[[], float]) -> bytes:
    """Return the report, unparsed; empty if the process has closed its connection. Raises BrokenEnvironment after the time limit."""
    waited_s = 0.0
    for extension in range(1, MAX_EXTENSION + 1):
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().sock_recv(control, PACKET_BYTES)
        except TimeoutError:
            before_s, waited_s = waited_s, cpu_wait_s()
            if waited_s - before_s < _SHORT_OF_CPU * timeout_s or extension == MAX_EXTENSION:
                text = f"loading the environment took longer than {extension * timeout_s:g} s\n{output.text()}"
                raise BrokenEnvironment(text.rstrip()) from None
        except OSError:
            return b""
    raise AssertionError("the last extension returns or raises")


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

"""The fork server: loads the environment once, then forks a process per episode, monitors and kills them.

The supervisor starts it by exec (`python -m marlaas_worker.sandbox.forkserver FD`) with a clean environment and
no credential. Its configuration is JSON on stdin; orders and reports are JSON packets on the socket FD. It has one thread,
so that forking is safe. It exits, with all its children, when the socket closes.

On a machine that many jobs share, its children have a full CPU share while they use little CPU time, else a low one. Most environments
compute for milliseconds in an episode. With a low share, this would take long beside a busy engine, and the whole step would wait for it.
An environment that computes for long must not take the CPU from engine and trainer.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.environment_types import ServiceFailed
from marlaas.envs import data_digest
from marlaas.envs.dataset.problems import SourceSilent
from marlaas.envs.demonstrations import with_data
from marlaas.envs.loading import Environment, load, refuse_shadows
from marlaas.envs.playing import explain
from marlaas.envs.suites import Environments, load_suites
from marlaas_api.cpu_shares import FULL_SHARE, LOW_SHARE, set_share
from marlaas_api.errors import InvalidInput
from marlaas_worker.sandbox import child, kernel
from marlaas_worker.sandbox.seclusion import seclude

CHECK_S = 0.25
ALLOWANCE = 0.1
"""CPU seconds per second that environments of one job may use with a full share."""
BURST_S = 0.5
"""Largest credit of the environments of one job, and their largest debt, in CPU seconds."""
MAX_PROCESSES = 64
MAX_PACKET_BYTES = 64 << 10
_MAX_REPORT_TEXT = 8000
_OF_CHAT_CLIENTS = ("marlaas.openai_server", "openai.resources.chat")
"""Modules that an episode imports at the first call of an `openai` client. Importing them takes half a second of CPU time."""


@dataclass(slots=True)
class CpuShare:
    """Credit of CPU time of a job's environments, which grows by `ALLOWANCE` each second and shrinks by the CPU time that they use.

    The share becomes low when the credit falls below 0, and full again when the credit has reached half of `BURST_S`.

    Attributes:
        at: time of the last `note`, at first of the creation, in seconds of any clock.
        is_low: whether the share is low now.
    """

    at: float
    is_low: bool = False
    _credit_s: float = BURST_S
    _used_s: float = 0.0

    def note(self, used_s: float, now: float) -> bool:
        """Update the credit and return whether the share is low from now on.

        used_s: CPU seconds that the environments have used so far, in total. now: time on the clock of `at`.
        """
        used_s = max(used_s, self._used_s)  # a process that has exited is counted when its parent exits
        credit_s = self._credit_s + (now - self.at) * ALLOWANCE - (used_s - self._used_s)
        self._credit_s, self._used_s, self.at = min(max(credit_s, -BURST_S), BURST_S), used_s, now
        self.is_low = self._credit_s < (BURST_S / 2 if self.is_low else 0.0)
        return self.is_low


@dataclass(slots=True)
class _RunningEpisode:
    """An episode that is being played by a child process.

    Attributes:
        number: number of the child in orders and reports.
        pid: process id of the child.
        tmp: path of the child's folder for temporary files.
        cause: why this server kills it (`order`, `memory`, `processes`); empty if it does not.
        idle_at_ns: CPU time of the child at the last check; -1 if there was none yet, or the child had descendants then. A child whose
            CPU time still equals this has not run since, so its limits need no check.
    """

    number: int
    pid: int
    tmp: str
    cause: str = ""
    idle_at_ns: int = -1


class ForkServer:
    """Forks and kills children by order; reports when a child started and how it ended.

    Invariant: a direct child of this process is an episode in `_playing`, or an orphan of an ended episode (a running episode
    adopts its own orphans). So every direct child that is not in `_playing` is killed.

    Args:
        control: connection to the supervisor.
        environments: the loaded environments, by suite; the job's own under the empty name.
        memory_bytes: limit of the memory in use of one episode.
    """

    def __init__(self, control: socket.socket, environments: Environments, memory_bytes: int) -> None:
        self._control = control
        self._environments = environments
        self._memory_bytes = memory_bytes
        self._playing: dict[int, _RunningEpisode] = {}
        self._wake = kernel.wake_on_child()
        self._checked_at = time.monotonic()
        self._session = os.getsid(0)
        self._share = CpuShare(self._checked_at)
        self._shared_bytes = kernel.held_bytes(os.getpid())

    def serve(self) -> None:
        """Execute orders until the supervisor closes the socket, then kill all children."""
        self._reap_all()
        self._set_share()
        while self._handle_next():
            self._check_limits()
        while self._playing:
            for playing in self._playing.values():
                kernel.kill_all(playing.pid)
            select.select([self._wake], [], [], CHECK_S)
            self._reap_all()

    def _handle_next(self) -> bool:
        """Wait for an order, an exit, or the next check; execute the order. Return False when the supervisor has closed the socket."""
        watched: list[socket.socket | int] = [self._control, self._wake]
        ready, _, _ = select.select(watched, [], [], CHECK_S if self._playing else None)
        if self._wake in ready:
            os.read(self._wake, 4096)
            self._reap_all()
        if self._control not in ready:
            return True
        packet, descriptors = kernel.receive(self._control, MAX_PACKET_BYTES, 2)
        if not packet:
            return False
        self._execute(json.loads(packet), descriptors)
        return True

    def _execute(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if order["order"] == "fork":
            self._fork(order["number"], descriptors)
            return
        self._reap_all()  # A child that has ended by itself is not killed by this order.
        playing = next((p for p in self._playing.values() if p.number == order["number"]), None)
        if playing is None:
            return
        if order["order"] == "stack":
            os.kill(playing.pid, child.STACK_SIGNAL)
        else:
            playing.cause = playing.cause or "order"
            kernel.kill_all(playing.pid)

    def _fork(self, number: int, descriptors: list[int]) -> None:
        channel, output = descriptors
        tmp = ""
        try:
            tmp = new_folder(number)
            pid = os.fork()
        except OSError as error:
            self._report(report="ended", number=number, status=None, cause=f"cannot fork: {error}")
            _remove(tmp)
            pid = -1
        if pid == 0:
            self._close_server()
            confinement = child.Confinement(self._memory_bytes, tmp, self._niceness)
            child.run(self._environments, socket.socket(fileno=channel), output, confinement)
        os.close(channel)
        os.close(output)
        if pid > 0:
            self._playing[pid] = _RunningEpisode(number, pid, tmp)
            self._report(report="forked", number=number, pid=pid)

    def _close_server(self) -> None:
        """In the child: close the server's descriptors and reset its signal handling."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake)

    def _reap_all(self) -> None:
        """Reap exited children. Then kill every child that is no episode: orphans of ended episodes, and processes that loading started.

        The ends of episodes are reported last, so that no process of an episode runs once the supervisor knows its end.
        """
        reports = []
        while (pid := kernel.exited_child()) is not None:
            reports += self._reap_child(pid)
        for orphan in set(kernel.children(os.getpid())) - set(self._playing):
            kernel.kill_all(orphan)
        for report in reports:
            self._report(**report)

    def _reap_child(self, pid: int) -> list[dict[str, Any]]:
        """Kill an exited child's process group and reap the child; return the report of its end if it was an episode, else an empty list."""
        kernel.kill_group(pid)
        _, status = os.waitpid(pid, 0)
        playing = self._playing.pop(pid, None)
        if playing is None:
            return []
        _remove(playing.tmp)
        code = os.waitstatus_to_exitcode(status)
        return [{"report": "ended", "number": playing.number, "status": code, "cause": playing.cause}]

    def _check_limits(self) -> None:
        """Kill episodes that use too much memory or have too many processes, and set the CPU share; at most every `CHECK_S`."""
        if time.monotonic() - self._checked_at < CHECK_S:
            return
        self._checked_at = time.monotonic()
        self._reap_all()  # threads of the environment may start processes here, and its code may have blocked the signal
        running_ns = 0
        for playing in self._playing.values():
            used_ns = kernel.cpu_time_ns(
                playing.pid
            )  # read first: what it does during the check counts at the next one
            running_ns += used_ns
            if used_ns == playing.idle_at_ns:
                continue
            others = kernel.descendants(playing.pid)
            running_ns += sum(map(kernel.cpu_time_ns, others))
            playing.idle_at_ns = -1 if others else used_ns
            self._keep_shares_low([playing.pid, *others])
            if not others and kernel.resident_bytes(playing.pid) <= self._memory_bytes:
                continue
            if len(others) > MAX_PROCESSES:
                playing.cause = "processes"
            elif self._held_bytes(playing.pid, others) > self._memory_bytes:
                playing.cause = "memory"
            if playing.cause:
                kernel.kill_all(playing.pid)
        self._share.note(kernel.cpu_s_of_ended_children() + running_ns / 1e9, self._checked_at)
        self._set_share()

    @property
    def _niceness(self) -> int:
        return LOW_SHARE if self._share.is_low else FULL_SHARE

    def _set_share(self) -> None:
        """Set the CPU share of this session. If it is low, also raise the niceness of episodes, for kernels without shares of sessions."""
        set_share(os.getpid(), self._niceness)
        for pid in self._playing if self._share.is_low else ():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, LOW_SHARE)

    def _keep_shares_low(self, pids: list[int]) -> None:
        """Lower the CPU share of those processes that have called setsid: the kernel gives each new session a full share (autogroup)."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) != self._session:
                    set_share(pid, LOW_SHARE)

    def _held_bytes(self, pid: int, others: list[int]) -> int:
        """Return the bytes of memory that an episode's process and its descendants hold; pages inherited from this process count once, not for each.

        pid: of the episode's process. others: process ids of its descendants.
        """
        added = (max(0, kernel.held_bytes(other) - self._shared_bytes) for other in others)
        return kernel.held_bytes(pid) + sum(added)

    def _report(self, **report: Any) -> None:
        _send(self._control, report)


def new_folder(number: int) -> str:
    """Create an episode's folder for temporary files, and return its path: `episode-NUMBER`, or a random name if that one exists already."""
    path = f"{tempfile.gettempdir()}/episode-{number}"
    try:
        os.mkdir(path, 0o700)  # noqa: PTH102  # `tempfile` and `Path` write to more pages, which are then copied
    except FileExistsError:
        return tempfile.mkdtemp(prefix="episode-")
    return path


def _remove(folder: str) -> None:
    """Remove an episode's folder. It is usually empty, and `rmtree` takes ten times as long as `rmdir`."""
    try:
        Path(folder).rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def _send(control: socket.socket, report: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the supervisor has exited: the next receive returns no packet
        control.send(json.dumps(report).encode())


def _load(config: dict[str, Any]) -> tuple[Environments, tuple[str, ...]]:
    """Load the job's environment and those of its suites.

    config: as `server_start._started` sends it.

    Returns: the environments by suite (the job's own under the empty name), and warnings about what the load has left in this process,
    such as open files and threads (`leftovers`).
    """
    kernel.limit_memory(config["memory_bytes"])
    if modules := config.get("modules"):
        refuse_shadows(Path(modules))
        search_first(modules)
    environment, told = load(config["name"], config["args"], config["agents"])
    suites, told_of_suites = load_suites(config.get("suites", {}), config["agents"])
    job: Environment = with_data(environment, config.get("demonstrations"))
    return {"": job, **suites}, (*told, *told_of_suites)


def broken(error: BaseException) -> dict[str, Any]:
    """Return the report that the environment cannot be loaded, from the error of its load.

    Fields of the report:
        text: the error, or its traceback.
        is_permanent: loading the environment again cannot help.
        fault: only if a service that the load needs has failed: class of the fault that the episodes get, `waited` or `infra`.
    """
    is_service = isinstance(error, ServiceFailed)
    is_permanent = isinstance(error, InvalidInput) and error.__cause__ is None and not is_service
    text = str(error) if is_permanent or is_service else explain(error)
    report = {"report": "broken", "text": text[-_MAX_REPORT_TEXT:], "is_permanent": is_permanent}
    return report | ({"fault": "waited" if isinstance(error, SourceSilent) else "infra"} if is_service else {})


def load_and_serve(control: socket.socket, config: dict[str, Any], loaded: Callable[[], None]) -> None:
    """Load the environment, report `ready` or `broken`, and serve until the supervisor closes the socket.

    Args:
        control: connection to the supervisor.
        config: as `server_start` sends it, with the environment's `name` and the folder `scratch` for temporary files.
        loaded: called after a successful load, before the first order.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = config["scratch"]
    try:
        environments, told = _load(config)
    except BaseException as error:
        _send(control, broken(error))
        return
    loaded()
    import_for_chat_clients()
    kernel.adopt_orphans()
    child.prepare()
    gc.collect()
    gc.freeze()  # children write to fewer shared pages
    suites = [name for name in environments if name]
    data = data_digest(one.data_digest for one in environments.values())
    known = {"told": told, "suites": suites, "data": data}
    _send(control, {"report": "ready", **{name: value for name, value in known.items() if value}})
    ForkServer(control, environments, config["memory_bytes"]).serve()


def import_for_chat_clients() -> None:
    """If the environment has imported `openai`, import the modules `_OF_CHAT_CLIENTS`, so that episodes' processes need not import them."""
    if "openai" in sys.modules:
        for name in _OF_CHAT_CLIENTS:
            with contextlib.suppress(Exception):  # a broken package is an error of the episode that uses it
                importlib.import_module(name)


def search_first(folder: str) -> None:
    """Make imports search a folder before all others, in this process and in Python processes that it starts."""
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))


def main() -> None:
    """Run the fork server. Until the environment is loaded, the kernel kills this process when the supervisor that started it exits."""
    control = socket.socket(fileno=int(sys.argv[1]))
    config = json.load(sys.stdin)
    seclude(Path(config["secluded"]) if config["secluded"] is not None else None)
    os.environ.update(config["given"])
    kernel.die_with_parent()  # the socket is not read while the environment is imported
    load_and_serve(control, config, kernel.outlive_parent)


if __name__ == "__main__":
    main()

"""Starts, restarts and stops role processes. The desired processes and the backoff are decided by `plan`."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marlaas.local.plan import ProcessRun, ProcessSpec, RestartBackoff, after, is_ready
from marlaas.local.processes import Launcher, RoleProcess, ask_to_end, kill
from marlaas.local.table import ProcessState
from marlaas_api.last_words import last_words
from marlaas_api.messages import ReplicaReport

GRACE_S = 20.0
"""Time for a role to drain. Killing it afterwards loses nothing, just as a crash loses nothing."""
IDLE_GRACE_S = 2.0
"""The same once every job is settled: nothing is left to drain, and an engine takes long to exit."""


@dataclass(slots=True)
class _ManagedProcess:
    """A role process across its restarts. `process` is None between two runs; `asked`: SIGTERM was sent."""

    spec: ProcessSpec
    process: RoleProcess | None = None
    watcher: asyncio.Task[None] | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    wanted: bool = True
    asked: bool = False
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    next_start_at: float = 0.0
    last_words: str = ""

    def state(self) -> ProcessState:
        started_at = self.started_at if self.process is not None else None
        ready = self.ready_at is not None and self.process is not None
        return ProcessState(self.spec, started_at, ready, self.backoff.in_a_row, self.last_words, self.next_start_at)


class Supervisor:
    """All role processes of one runner. `changed` is set whenever one of them exits."""

    def __init__(self, launcher: Launcher, tasks: asyncio.TaskGroup, now: Callable[[], float] = time.time) -> None:
        self._launcher = launcher
        self._tasks = tasks
        self._now = now
        self._processes: dict[str, _ManagedProcess] = {}
        self._news: list[str] = []
        self.changed = asyncio.Event()

    async def reconcile(self, desired: Sequence[ProcessSpec], reports: Sequence[ReplicaReport]) -> None:
        """Start and stop processes to match `desired`. Raises InvalidInput if a log cannot be written."""
        wanted = {spec.key: spec for spec in desired}
        self._forget_ended()
        for key, managed in self._processes.items():
            managed.wanted = key in wanted
            if not managed.wanted:
                self._end(managed)
        for key, spec in wanted.items():
            managed = self._processes.setdefault(key, _ManagedProcess(spec))
            self._note_ready(managed, reports)
            if managed.process is None and not managed.backoff.gives_up and self._now() >= managed.next_start_at:
                await self._start(managed)

    def states(self) -> tuple[ProcessState, ...]:
        """Return the states of the wanted processes."""
        return tuple(managed.state() for managed in self._processes.values() if managed.wanted)

    def given_up(self) -> tuple[tuple[ProcessSpec, str], ...]:
        """Return the processes that were given up, each with a sentence about the reason."""
        return tuple(
            (managed.spec, self._exit_text(managed)) for managed in self._processes.values() if managed.backoff.gives_up
        )

    def news(self) -> list[str]:
        """Return sentences about processes that exited since the last call."""
        news, self._news = self._news, []
        return news

    async def drain(self, grace_s: float) -> None:
        """Send SIGTERM to every process, wait up to `grace_s` seconds, then kill the rest."""
        watchers = [managed.watcher for managed in self._processes.values() if managed.watcher is not None]
        for managed in self._processes.values():
            managed.wanted = False
            self._end(managed)
        if watchers:
            await asyncio.wait(watchers, timeout=grace_s)
        self.kill()
        if watchers:
            await asyncio.wait(watchers)

    def kill(self) -> None:
        """Kill every process at once."""
        for managed in self._processes.values():
            managed.wanted = False
            if managed.process is not None:
                kill(managed.process)

    async def _start(self, managed: _ManagedProcess) -> None:
        managed.process = await self._launcher.start(managed.spec)
        managed.started_at, managed.ready_at, managed.asked = self._now(), None, False
        managed.watcher = self._tasks.create_task(
            self._watch(managed, managed.process), name=f"watch {managed.spec.key}"
        )

    def _end(self, managed: _ManagedProcess) -> None:
        """Send SIGTERM once; kill the process if it has not exited after GRACE_S."""
        if managed.process is None or managed.asked:
            return
        managed.asked = True
        ask_to_end(managed.process)
        asyncio.get_running_loop().call_later(GRACE_S, self._kill_if_there, managed, managed.process)

    @staticmethod
    def _kill_if_there(managed: _ManagedProcess, process: RoleProcess) -> None:
        if managed.process is process:
            kill(process)

    def _forget_ended(self) -> None:
        """Forget processes that have ended and are no longer wanted, and the credentials of users without processes."""
        ended = [one for one in self._processes.values() if one.process is None and not one.wanted]
        if not ended:
            return
        for managed in ended:
            del self._processes[managed.spec.key]
        users = {self._launcher.user(managed.spec) for managed in ended}
        for user in users - {self._launcher.user(managed.spec) for managed in self._processes.values()}:
            self._launcher.credentials.forget(user)

    def _note_ready(self, managed: _ManagedProcess, reports: Sequence[ReplicaReport]) -> None:
        if managed.process is None or managed.ready_at is not None:
            return
        if is_ready(managed.spec, managed.started_at, reports, self._now()):
            managed.ready_at = self._now()

    async def _watch(self, managed: _ManagedProcess, process: RoleProcess) -> None:
        exit_code = await self._launcher.sweep(process)
        now = self._now()
        managed.process, managed.watcher = None, None
        if managed.wanted and not managed.asked:
            managed.backoff = after(managed.backoff, ProcessRun(now, managed.ready_at, exit_code))
            managed.next_start_at = now + managed.backoff.delay_s
            managed.last_words = self._last_words(managed.spec, exit_code)
            self._news.append(self._exit_text(managed))
        self.changed.set()

    def _exit_text(self, managed: _ManagedProcess) -> str:
        text = f"{managed.spec} exited: {managed.last_words}"
        if not managed.backoff.gives_up:
            return f"{text}; it restarts"
        after = f" after {managed.backoff.in_a_row} exits in a row" if managed.backoff.in_a_row > 1 else ""
        return f"{text}; not restarted{after} (log: {self._launcher.log(managed.spec)})"

    def _last_words(self, spec: ProcessSpec, exit_code: int) -> str:
        if exit_code < 0:
            return f"killed by {signal.Signals(-exit_code).name}"
        return last_words(self._launcher.log_tail(spec))

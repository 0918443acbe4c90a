"""Starts, restarts and stops role processes. The desired processes and the backoff are decided by `plan`."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marlaas.local.plan import MAX_START_S, ProcessRun, ProcessSpec, RestartBackoff, after, is_ready
from marlaas.local.processes import Launcher, RoleProcess, ask_to_end, kill
from marlaas.local.table import ProcessState, duration
from marlaas_api.last_words import last_line, last_words
from marlaas_api.messages import ReplicaReport

GRACE_S = 20.0
"""Time for a role to drain. Killing it afterwards loses nothing, just as a crash loses nothing."""
SLOW_START_S = 90.0
"""A start that takes longer is shown with the last line of its log."""
EXIT_OVERDUE = 1
"""Exit code by which a process counts that was killed because it did not become ready: it is given up after a few of them."""
IDLE_GRACE_S = 2.0
"""The same once every job is settled: nothing is left to drain, and an engine takes long to exit."""


@dataclass(slots=True)
class _ManagedProcess:
    """A role process across its restarts. `process` is None between two runs; `asked`: SIGTERM was sent; `overdue`: killed, because it did not become ready."""

    spec: ProcessSpec
    process: RoleProcess | None = None
    watcher: asyncio.Task[None] | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    wanted: bool = True
    asked: bool = False
    overdue: bool = False
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    next_start_at: float = 0.0
    last_words: str = ""

    def started_s(self, now: float) -> float:
        """Return the seconds since its start if it is not ready, else 0."""
        return now - self.started_at if self.process is not None and self.ready_at is None else 0.0

    def state(self, last_line: str) -> ProcessState:
        started_at = self.started_at if self.process is not None else None
        ready = self.ready_at is not None and self.process is not None
        return ProcessState(
            self.spec, started_at, ready, self.backoff.in_a_row, self.last_words, self.next_start_at, last_line
        )


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
            self._end_overdue(managed)
            if managed.process is None and not managed.backoff.gives_up and self._now() >= managed.next_start_at:
                await self._start(managed)

    def states(self) -> tuple[ProcessState, ...]:
        """Return the states of the wanted processes. A start that takes long has the last line of its log."""
        return tuple(
            managed.state(self._last_line(managed) if managed.started_s(self._now()) >= SLOW_START_S else "")
            for managed in self._processes.values()
            if managed.wanted
        )

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
        self._launcher.kill_sandboxes()

    async def _start(self, managed: _ManagedProcess) -> None:
        managed.process = await self._launcher.start(managed.spec)
        managed.started_at, managed.ready_at = self._now(), None
        managed.asked = managed.overdue = False
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

    def _end_overdue(self, managed: _ManagedProcess) -> None:
        if managed.process is not None and managed.started_s(self._now()) >= MAX_START_S:
            managed.overdue = True
            kill(managed.process)

    async def _watch(self, managed: _ManagedProcess, process: RoleProcess) -> None:
        exit_code = await self._launcher.sweep(process)
        now = self._now()
        managed.process, managed.watcher = None, None
        if managed.wanted and not managed.asked:
            code = EXIT_OVERDUE if managed.overdue else exit_code
            managed.backoff = after(managed.backoff, ProcessRun(now, managed.ready_at, code))
            managed.next_start_at = now + managed.backoff.delay_s
            managed.last_words = self._last_words(managed, exit_code)
            self._news.append(self._exit_text(managed))
        self.changed.set()

    def _exit_text(self, managed: _ManagedProcess) -> str:
        text = f"{managed.spec} exited: {managed.last_words}"
        if not managed.backoff.gives_up:
            return f"{text}; it restarts"
        after = f" after {managed.backoff.in_a_row} exits in a row" if managed.backoff.in_a_row > 1 else ""
        return f"{text}; not restarted{after} (log: {self._launcher.log(managed.spec)})"

    def _last_words(self, managed: _ManagedProcess, exit_code: int) -> str:
        if managed.overdue:
            limit, line = duration(MAX_START_S), self._last_line(managed)
            return f"killed, because it was not ready after {limit}; its last words: {line or 'none'}"
        if exit_code < 0:
            return f"killed by {signal.Signals(-exit_code).name}"
        return last_words(self._launcher.log_tail(managed.spec))

    def _last_line(self, managed: _ManagedProcess) -> str:
        return last_line(self._launcher.log_tail(managed.spec))

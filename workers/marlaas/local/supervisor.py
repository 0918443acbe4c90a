"""Starts, restarts and stops role processes. The desired processes and the backoff are decided by `plan` and `restarts`."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marlaas.local.plan import ProcessRun, ProcessSpec, RestartBackoff, after, is_ready
from marlaas.local.processes import Launcher, ask_to_end, kill
from marlaas.local.table import ProcessState
from marlaas_api.last_words import last_words
from marlaas_api.messages import ReplicaReport

GRACE_S = 20.0
"""Time for a role to drain. Killing it afterwards loses nothing, just as a crash loses nothing."""
IDLE_GRACE_S = 2.0
"""The same once every job is settled: nothing is left to drain, and an engine takes long to exit."""


@dataclass(slots=True)
class _Place:
    """A role process across its restarts. `process` is None between two runs; `asked`: SIGTERM was sent."""

    spec: ProcessSpec
    process: asyncio.subprocess.Process | None = None
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
        self._places: dict[str, _Place] = {}
        self._news: list[str] = []
        self.changed = asyncio.Event()

    async def reconcile(self, desired: Sequence[ProcessSpec], reports: Sequence[ReplicaReport]) -> None:
        """Start and stop processes to match `desired`. Raises InvalidInput if a log cannot be written."""
        wanted = {spec.key: spec for spec in desired}
        for key, place in self._places.items():
            place.wanted = key in wanted
            if not place.wanted:
                self._end(place)
        for key, spec in wanted.items():
            place = self._places.setdefault(key, _Place(spec))
            self._note_ready(place, reports)
            if place.process is None and not place.backoff.gives_up and self._now() >= place.next_start_at:
                await self._start(place)

    def states(self) -> tuple[ProcessState, ...]:
        """Return the states of the wanted processes."""
        return tuple(place.state() for place in self._places.values() if place.wanted)

    def given_up(self) -> tuple[tuple[ProcessSpec, str], ...]:
        """Return the processes that were given up, each with a sentence about the reason."""
        return tuple((place.spec, self._obituary(place)) for place in self._places.values() if place.backoff.gives_up)

    def news(self) -> list[str]:
        """Return sentences about processes that exited since the last call."""
        told, self._news = self._news, []
        return told

    async def drain(self, grace_s: float) -> None:
        """Send SIGTERM to every process, wait up to `grace_s` seconds, then kill the rest."""
        watchers = [place.watcher for place in self._places.values() if place.watcher is not None]
        for place in self._places.values():
            place.wanted = False
            self._end(place)
        if watchers:
            await asyncio.wait(watchers, timeout=grace_s)
        self.kill()
        if watchers:
            await asyncio.wait(watchers)

    def kill(self) -> None:
        """Kill every process at once."""
        for place in self._places.values():
            place.wanted = False
            if place.process is not None:
                kill(place.process)

    async def _start(self, place: _Place) -> None:
        place.process = await self._launcher.start(place.spec)
        place.started_at, place.ready_at, place.asked = self._now(), None, False
        place.watcher = self._tasks.create_task(self._watch(place, place.process), name=f"watch {place.spec.key}")

    def _end(self, place: _Place) -> None:
        """Send SIGTERM once; kill the process if it has not exited after GRACE_S."""
        if place.process is None or place.asked:
            return
        place.asked = True
        ask_to_end(place.process)
        asyncio.get_running_loop().call_later(GRACE_S, self._kill_if_there, place, place.process)

    @staticmethod
    def _kill_if_there(place: _Place, process: asyncio.subprocess.Process) -> None:
        if place.process is process:
            kill(process)

    def _note_ready(self, place: _Place, reports: Sequence[ReplicaReport]) -> None:
        starting = place.process is not None and place.ready_at is None
        if starting and is_ready(place.spec, place.started_at, reports, self._now()):
            place.ready_at = self._now()

    async def _watch(self, place: _Place, process: asyncio.subprocess.Process) -> None:
        exit_code = await self._launcher.sweep(process)
        now = self._now()
        place.process, place.watcher = None, None
        if place.wanted and not place.asked:
            place.backoff = after(place.backoff, ProcessRun(now, place.ready_at, exit_code))
            place.next_start_at = now + place.backoff.delay_s
            place.last_words = self._words(place.spec, exit_code)
            self._news.append(self._obituary(place))
        self.changed.set()

    def _obituary(self, place: _Place) -> str:
        text = f"{place.spec} died: {place.last_words}"
        if not place.backoff.gives_up:
            return f"{text}; it starts again"
        times = f" {place.backoff.in_a_row} times in a row" if place.backoff.in_a_row > 1 else ""
        return f"{text}; given up after it died{times} (its log: {self._launcher.log(place.spec)})"

    def _words(self, spec: ProcessSpec, exit_code: int) -> str:
        if exit_code < 0:
            return f"killed by {signal.Signals(-exit_code).name}"
        return last_words(self._launcher.log_tail(spec))

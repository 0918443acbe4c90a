"""Purge what a job no longer needs of the streams EPISODES and TURNS.

A step on record leaves a mark: everything below it belongs to steps on record. It is purged one step later, so that a reader of episodes has
time, and not before the recorder of `marlaas run` has acked what lies below it. Marks are in memory only: after a restart the next step
makes a new one. A purge may be repeated, and a mark of long ago is still right, since sequences only grow.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import Bus, Position
from marlaas_api.failpoints import failpoint
from marlaas_api.names import JobRef

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""A recorder that acks nothing for so long is dead: its job goes on without it."""
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class PurgeMark:
    """Sequences below which nothing is needed, of EPISODES and TURNS, once the recorder has acked the episodes up to `read`."""

    episodes: int
    turns: int
    read: int


class PurgeMarks:
    """The marks of one job that are not purged yet, oldest first. Pure."""

    def __init__(self) -> None:
        self.waiting: list[PurgeMark] = []
        self._acked = -1
        self._acked_at = 0.0

    def has_due(self, *, at_once: bool) -> bool:
        """Whether a mark may be purged if the recorder allows it: all but the newest, or the newest too."""
        return len(self.waiting) > (0 if at_once else 1)

    def take(self, recorder: Position | None, now: float, *, at_once: bool) -> PurgeMark | None:
        """The newest mark that may be purged; it and those before it are forgotten. recorder None: there is none."""
        due = self.waiting if at_once else self.waiting[:-1]
        due = [mark for mark in due if self._is_read(recorder, mark, now)]
        self.waiting = self.waiting[len(due) :]
        return due[-1] if due else None

    def _is_read(self, recorder: Position | None, mark: PurgeMark, now: float) -> bool:
        if recorder is None or recorder.has_acked(mark.read):
            return True
        if recorder.acked != self._acked:
            self._acked, self._acked_at = recorder.acked, now
        return now - self._acked_at > PATIENCE_S


class Retention:
    """One job's."""

    def __init__(self, bus: Bus, ref: JobRef, now: Callable[[], float]) -> None:
        self._bus, self._ref, self._now = bus, ref, now
        self._first: dict[str, int] = {}
        self._last = 0
        self._purged_turns = 1
        self._marks = PurgeMarks()

    def note(self, sequence: int, group: str | None) -> None:
        """An episode is stored; group: its group, if that is open."""
        if group is not None:
            self._first.setdefault(group, sequence)
        self._last = max(self._last, sequence)

    def recorded(self, open_groups: Collection[str], turns: int) -> None:
        """A step is on record: only these groups are open, and turns below a sequence are of others."""
        self._first = {group: sequence for group, sequence in self._first.items() if group in open_groups}
        self._marks.waiting.append(PurgeMark(min(self._first.values(), default=self._last + 1), turns, self._last))

    def ended(self, turns: int) -> None:
        """The job has ended: turns below a sequence are needed by its recorder alone. Its last episodes stay for readers."""
        self._marks.waiting.append(PurgeMark(1, turns, _ALL))

    def groups(self) -> Collection[str]:
        """Groups with an episode that were open at the last record, or have come since."""
        return self._first.keys()

    async def purge(self, *, at_once: bool) -> bool:
        """Purge what may be; whether there was anything. Raises as the bus does."""
        if not self._marks.has_due(at_once=at_once):
            return False
        recorder = await self._bus.position(
            subjects.EPISODES, subjects.consumer(self._ref.namespace, self._ref.name, "reader")
        )
        mark = self._marks.take(recorder, self._now(), at_once=at_once)
        if mark is None:
            return False
        if mark.turns > self._purged_turns:
            turns = subjects.turn(self._ref.namespace, self._ref.name, "*", "*")
            await self._bus.purge(subjects.TURNS, turns, up_to=mark.turns)
            self._purged_turns = mark.turns
        failpoint("orchestrator.forget.after_turns")
        if mark.episodes > 1:
            await self._bus.purge(
                subjects.EPISODES, subjects.episode(self._ref.namespace, self._ref.name), up_to=mark.episodes
            )
        return True

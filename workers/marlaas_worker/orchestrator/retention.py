"""Purges the messages of EPISODES and TURNS that a job no longer needs.

Each recorded step sets a mark: all messages below it belong to recorded steps. They are purged one step later,
to give readers of episodes time. The purge also waits until the recorder of `marlaas run` has acked the
episodes below the mark. Marks are in memory only: after a restart, the next step sets a new one. A purge may be
repeated, and an old mark stays valid, since sequences only grow.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import Bus, Position
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import ReplicaReport
from marlaas_api.names import JobRef
from marlaas_api.retries import patiently

PERIOD_S = 1.0
PATIENCE_S = 600.0
"""Seconds without an ack after which the recorder counts as gone, and the job's messages are purged without it."""
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class PurgeMark:
    """Sequences of EPISODES and TURNS below which nothing is needed, once the recorder has acked the episodes up to `read`."""

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
        """Return whether a mark may be purged if the recorder allows it. at_once: the newest mark counts too."""
        return len(self.waiting) > (0 if at_once else 1)

    def due(self, recorder: Position | None, now: float, *, at_once: bool) -> PurgeMark | None:
        """Return the newest mark that may be purged; call `purged` after the purge.

        Args:
            recorder: its position in EPISODES; None if there is no recorder.
            now: seconds.
        """
        due = self.waiting if at_once else self.waiting[:-1]
        due = [mark for mark in due if self._is_read(recorder, mark, now)]
        return due[-1] if due else None

    def purged(self, mark: PurgeMark) -> None:
        """Remove a mark and all older ones."""
        self.waiting = self.waiting[self.waiting.index(mark) + 1 :]

    def _is_read(self, recorder: Position | None, mark: PurgeMark, now: float) -> bool:
        if recorder is None or recorder.has_acked(mark.read):
            return True
        if recorder.acked != self._acked:
            self._acked, self._acked_at = recorder.acked, now
        return now - self._acked_at > PATIENCE_S


class Retention:
    """Purges the streams of one job."""

    def __init__(self, bus: Bus, ref: JobRef, now: Callable[[], float]) -> None:
        self._bus, self._ref, self._now = bus, ref, now
        self._first: dict[str, int] = {}
        self._last = 0
        self._purged_turns = 1
        self._marks = PurgeMarks()

    def note(self, sequence: int, group: str | None) -> None:
        """Note a stored episode. group: its group, if that is open."""
        if group is not None:
            self._first.setdefault(group, sequence)
        self._last = max(self._last, sequence)

    def recorded(self, open_groups: Collection[str], turns: int) -> None:
        """Set a mark after a step was recorded.

        Args:
            open_groups: all groups that are open now.
            turns: sequence of TURNS below which all turns belong to recorded steps.
        """
        self._first = {group: sequence for group, sequence in self._first.items() if group in open_groups}
        self._marks.waiting.append(PurgeMark(min(self._first.values(), default=self._last + 1), turns, self._last))

    def ended(self, turns: int) -> None:
        """Set the last mark of a job that has ended: only its recorder still needs turns below a sequence.

        Its last episodes stay for readers.
        """
        self._marks.waiting.append(PurgeMark(1, turns, _ALL))

    def groups(self) -> Collection[str]:
        """Return the groups with a stored episode that were open at the last record, or have come since."""
        return self._first.keys()

    async def purge(self, *, at_once: bool) -> bool:
        """Purge up to the newest mark that may be purged; return whether there was one. Raises errors of the bus."""
        if not self._marks.has_due(at_once=at_once):
            return False
        recorder = await self._bus.position(
            subjects.EPISODES, subjects.consumer(self._ref.namespace, self._ref.name, "reader")
        )
        mark = self._marks.due(recorder, self._now(), at_once=at_once)
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
        self._marks.purged(mark)
        return True


class Leftovers:
    """Purges the turns of jobs that have ended. now: returns unix seconds.

    If `marlaas run` has a recorder for the job, the purge waits until it has read the last episodes. Crash-safe:
    the progress keys show which jobs have ended, and an orchestrator checks all of them when it starts.

    A play that was given up can record a turn after its job has ended. The replicas' reports tell of it.
    """

    def __init__(self, bus: Bus, now: Callable[[], float]) -> None:
        self._bus, self._now = bus, now
        self._jobs: dict[JobRef, Retention] = {}
        self._ended: dict[str, JobRef] = {}
        self._recorded: Mapping[str, int] = {}

    def ended(self, last_sequence: int, *jobs: JobRef) -> None:
        """Note jobs that have ended: they no longer need their turns up to `last_sequence` of TURNS."""
        for ref in jobs:
            self._jobs[ref] = Retention(self._bus, ref, self._now)
            self._jobs[ref].ended(last_sequence + 1)
            self._ended[ref.uid] = ref

    async def note(self, reports: Iterable[ReplicaReport], idle: Container[str]) -> None:
        """Purge again the turns of ended jobs for which the replicas report other totals than before. Raises errors of the bus.

        Args:
            idle: uids of the jobs that have a document and do not run; an ended job that is resumed is not one of them.
        """
        self._ended = {uid: ref for uid, ref in self._ended.items() if uid in idle}
        recorded = Counter[str]()
        for report in reports:
            recorded.update({uid: report.job_turn_bytes.get(uid, 0) for uid in self._ended})
        late = [ref for uid, ref in self._ended.items() if recorded[uid] != self._recorded.get(uid, 0)]
        if late:
            self.ended((await self._bus.state(subjects.TURNS)).last_sequence, *late)
        self._recorded = recorded

    async def follow(self) -> None:
        """Purge the turns of ended jobs, until cancelled."""
        while True:
            await patiently(self.look, "purging the turns of ended jobs", PERIOD_S)
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Purge the turns that may be purged now. Raises errors of the bus."""
        for ref, retention in list(self._jobs.items()):
            if await retention.purge(at_once=True) and self._jobs.get(ref) is retention:  # not a newer mark
                del self._jobs[ref]

"""Purges the messages of EPISODES and TURNS that a job no longer needs.

Each recorded step sets a mark: all messages below it belong to recorded steps. They are purged one step later,
to give readers of episodes time. The purge also waits until the recorder of `marlaas run` has acked all episodes that
were stored when the mark was set. Marks are in memory only: after a restart, the next step sets a new one. A purge may
be repeated, and an old mark stays valid, since sequences only grow.
"""

from collections.abc import Callable
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import Bus, Position
from marlaas_api.failpoints import failpoint
from marlaas_api.names import JobRef

PATIENCE_S = 600.0
"""Seconds without an ack of the recorder (of `marlaas run`) after which it counts as gone, and the job's messages are purged without it."""
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class PurgeMark:
    """Sequence numbers of streams below which a job's messages may be purged, and the time of the purge.

    Attributes:
        episodes: messages of EPISODES below this may be purged.
        turns: messages of TURNS below this may be purged.
        read: the purge waits until the recorder has acked all messages of EPISODES up to this one.
    """

    episodes: int
    turns: int
    read: int


class Retention:
    """Purges the messages of one job from EPISODES and TURNS when they are no longer needed.

    Each recorded step sets a mark (`PurgeMark`): all messages below it may be purged one step later, once the recorder has acked the episodes.
    The recorder is the part of `marlaas run` that stores a job's episodes; a job may have none. now: clock in seconds.
    """

    def __init__(self, bus: Bus, ref: JobRef, now: Callable[[], float]) -> None:
        self._bus, self._ref, self._now = bus, ref, now
        self._first: dict[str, int] = {}
        self._last = 0
        self._purged_turns = 1
        self._marks: list[PurgeMark] = []
        self._acked = -1
        self._acked_at = 0.0

    def add_episode(self, sequence: int, group: str | None) -> None:
        """Add the sequence of a stored episode. group: name of the episode's group if that is open; None otherwise."""
        if group is not None:
            self._first.setdefault(group, sequence)
        self._last = max(self._last, sequence)

    def mark_step(self, is_open: Callable[[str], bool], turns: int) -> None:
        """Set a mark after a step was recorded, for the purge of the messages that only recorded steps need.

        Args:
            is_open: returns whether a group is open now.
            turns: sequence number of TURNS; all turns of the job below it belong to recorded steps and evaluations.
        """
        self._first = {group: sequence for group, sequence in self._first.items() if is_open(group)}
        self._marks.append(PurgeMark(min(self._first.values(), default=self._last + 1), turns, self._last))

    def mark_end(self, turns: int) -> None:
        """Set the last mark of a job that has ended. Its last episodes stay for readers.

        turns: sequence number of TURNS; the job's turns below it are needed by its recorder only.
        """
        self._marks.append(PurgeMark(1, turns, _ALL))

    async def purge(self, *, at_once: bool) -> bool:
        """Purge up to the newest mark whose episodes the recorder has acked; return whether there was such a mark. Raises errors of the bus.

        at_once: use the newest mark, too, which otherwise waits for the mark of the next step.
        """
        marks = self._marks if at_once else self._marks[:-1]
        if not marks:
            return False
        name = subjects.consumer(self._ref.namespace, self._ref.name, "reader")
        recorder = await self._bus.position(subjects.EPISODES, name)
        mark = next((mark for mark in reversed(marks) if self._is_read(recorder, mark)), None)
        if mark is None:
            return False
        if mark.turns > self._purged_turns:
            turns = subjects.turn(self._ref.namespace, self._ref.name, "*", "*")
            await self._bus.purge(subjects.TURNS, turns, up_to=mark.turns)
            self._purged_turns = mark.turns
        failpoint("orchestrator.purge.after_turns")
        if mark.episodes > 1:
            episodes = subjects.episode(self._ref.namespace, self._ref.name)
            await self._bus.purge(subjects.EPISODES, episodes, up_to=mark.episodes)
        self._marks = self._marks[self._marks.index(mark) + 1 :]
        return True

    def _is_read(self, recorder: Position | None, mark: PurgeMark) -> bool:
        """Return whether the purge up to a mark needs to wait no more for the recorder.

        True if the recorder has acked the episodes up to the mark, or nothing for PATIENCE_S seconds, or if there is none (None).
        """
        if recorder is None or recorder.has_acked(mark.read):
            return True
        if recorder.acked != self._acked:
            self._acked, self._acked_at = recorder.acked, self._now()
        return self._now() - self._acked_at > PATIENCE_S

"""Working times of engine, environment and trainer for a job, from its episodes and steps. Pure.

engine: at least one turn of the job was being generated. environment: at least one episode was between two turns,
in its own code or in a tool. trainer: the step's computation as the trainer measured it, up to the step's end.
Times are unix seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import StepRecord

Interval = tuple[float, float]
TRAIN_S = "train_s"
"""Metric of a step: seconds of the trainer's forward pass, backward pass and optimizer."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Disjoint intervals in order, per lane. None: the records lack this time."""

    name: str
    begin: float
    end: float
    engine: tuple[Interval, ...] | None
    environment: tuple[Interval, ...] | None
    trainer: tuple[Interval, ...] | None

    def lanes(self) -> dict[str, tuple[Interval, ...] | None]:
        """Return the three lanes by name."""
        return {"engine": self.engine, "environment": self.environment, "trainer": self.trainer}

    def share(self, intervals: Sequence[Interval]) -> float:
        """Return the share of the whole time that the intervals cover."""
        return sum(end - begin for begin, end in intervals) / max(self.end - self.begin, 1e-9)


def timeline(name: str, episodes: Iterable[EpisodeRecord], steps: Sequence[StepRecord]) -> Timeline | None:
    """Return the job's timeline; None if the records lack all working times."""
    records = list(episodes)
    engine = union(_generating(records))
    environment = union(interval for record in records for interval in _playing(record))
    trainer = union((step.at - step.metrics[TRAIN_S], step.at) for step in steps if TRAIN_S in step.metrics)
    whole = union([*engine, *environment, *((step.at - step.wall_s, step.at) for step in steps)])
    has_turns, has_training = bool(engine), bool(trainer)
    if not (has_turns or has_training):
        return None
    return Timeline(
        name,
        whole[0][0],
        max(end for _, end in whole),
        engine if has_turns else None,
        environment if has_turns else None,
        trainer if has_training else None,
    )


def union(intervals: Iterable[Interval], gap_s: float = 0.0) -> tuple[Interval, ...]:
    """Return disjoint intervals that cover the same time, in order. Intervals up to `gap_s` apart are joined."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(joined)


def _generating(records: Iterable[EpisodeRecord]) -> Iterator[Interval]:
    for record in records:
        for turn in record.turns:
            yield (turn.at - turn.engine_s, turn.at)


def _playing(record: EpisodeRecord) -> Iterator[Interval]:
    """Yield the times between a turn's end and the next request, and from the last turn to the episode's end if recorded."""
    turns = sorted(record.turns, key=lambda turn: turn.at)
    for before, after in pairwise(turns):
        yield (before.at, after.at - after.engine_s - after.queue_s)
    if turns:
        yield (turns[-1].at, record.at)

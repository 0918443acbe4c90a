"""Figures of `bench soak`, computed from the raw events of a run. Pure.

A sample is taken every 15 s. Its x is the number of episodes that have ended so far.
"""

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.multitenant_figures import Events
from bench.runs import table

PARTS = (0.1, 0.5, 1.0)
ROLES = ("rollout", "trainer", "orchestrator", "nats-server", "runner", "sandbox")
STREAM_FIGURES = {"messages": 1, "bytes": 1 << 10, "subjects": 1, "consumers": 1}
"""Figures of a stream, and their units."""
Sample = tuple[float, Mapping[str, Any]]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Slope:
    """Slope of the least-squares line, with its standard error. The error assumes independent samples, which memory is not."""

    value: float
    error: float

    def __sub__(self, other: "Slope") -> "Slope":
        return Slope(self.value - other.value, math.hypot(self.error, other.error))

    def __mul__(self, factor: float) -> "Slope":
        return Slope(self.value * factor, self.error * abs(factor))


def samples(events: Events) -> list[Sample]:
    """Return the samples of memory between the first turn and the last step, with the number of episodes that had ended."""
    ends = sorted(episode.at for job in events.jobs.values() for episode in job.episodes)
    begin, end = events.begin, events.end
    taken = [line for line in events.usage if "pss_bytes" in line and begin <= line["at"] <= end]
    return [(float(bisect(ends, line["at"])), line) for line in taken]


def slope(points: Points) -> Slope:
    """Return the slope of the line through points; nan if they have no extent, and nan as the error of fewer than three."""
    num = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / num for axis in (0, 1)) if num else (0.0, 0.0)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return Slope(math.nan, math.nan)
    value = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    squares = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in points)
    return Slope(value, math.sqrt(squares / (num - 2) / spread) if num > 2 else math.nan)


def growth(taken: Sequence[Sample], role: str) -> Slope:
    """Return a role's growth in bytes per episode, over the second half of the episodes."""
    half = taken[-1][0] / 2 if taken else 0.0
    return slope([(x, float(line["pss_bytes"].get(role, 0))) for x, line in taken if x >= half])


def at_parts(taken: Sequence[Sample], value: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """Return a value of the samples that are nearest to the parts of the episodes."""
    last = taken[-1][0]
    return [value(min(taken, key=lambda sample: abs(sample[0] - part * last))[1]) for part in PARTS]


def memory_table(taken: Sequence[Sample]) -> str:
    """Return the table of memory: at parts of the episodes, and its growth with twice the standard error."""
    rows = []
    for role in ROLES:
        sizes = at_parts(taken, _of_role("pss_bytes", role))
        rows.append([role, *(f"{size / 2**20:.0f}" for size in sizes), kib(growth(taken, role) * 1000)])
    return table(["MiB", *_parts(), "KiB per 1,000 episodes, second half"], rows)


def handles_table(taken: Sequence[Sample]) -> str:
    """Return the table of open files and threads."""
    rows = [
        [role, *(f"{files:.0f} / {threads:.0f}" for files, threads in zip(*both, strict=True))]
        for role in ROLES
        if (both := [at_parts(taken, _of_role(what, role)) for what in ("files", "threads")])
    ]
    return table(["open files / threads", *_parts()], rows)


def streams_table(taken: Sequence[Sample]) -> str:
    """Return the table of streams: messages, KiB, subjects (of a bucket: keys and markers of deleted ones) and consumers."""
    known = [(x, line) for x, line in taken if line.get("streams")]
    names = sorted({name for _, line in known for name in line["streams"]})
    rows = []
    for name in names:
        columns = [
            [value / unit for value in at_parts(known, _of_stream(name, figure))]
            for figure, unit in STREAM_FIGURES.items()
        ]
        rows.append([name, *(" / ".join(f"{value:.0f}" for value in one) for one in zip(*columns, strict=True))])
    return table(["messages / KiB / subjects / consumers", *_parts()], rows)


def apart_table(churn: Sequence[Sample], long: Sequence[Sample], episodes_per_job: float) -> str:
    """Return the table of growth by episodes and by jobs: the long jobs' is by episodes; a short job adds the difference."""
    rows = []
    for role in ROLES:
        by_episode = growth(long, role)
        by_job = (growth(churn, role) - by_episode) * episodes_per_job
        rows.append([role, kib(by_episode * 1000), kib(by_job * 100)])
    return table(["", "KiB per 1,000 episodes", "KiB per 100 deleted jobs, beside their episodes"], rows)


def kib(found: Slope) -> str:
    """Return a slope in KiB with twice its standard error; empty of too few samples."""
    if math.isnan(found.error):
        return ""
    return f"{found.value / 1024:+.0f} ± {2 * found.error / 1024:.0f}"


def _parts() -> list[str]:
    return [f"{part:.0%}" for part in PARTS]


def _of_role(what: str, role: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda line: float(line.get(what, {}).get(role, 0))


def _of_stream(name: str, figure: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda line: float(line["streams"].get(name, {}).get(figure, 0))

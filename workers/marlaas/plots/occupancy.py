"""Who was at work in engine, environment and trainer: counts over time by group of jobs, from their timelines. Pure."""

from collections.abc import Iterable, Sequence

from marlaas.plots.series import Interval, Timeline, union

LANES = ("engine", "environment", "trainer")


def on_common_time(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Return the timelines with seconds since the begin of their run instead of unix seconds."""
    begins: dict[str, float] = {}
    for one in timelines:
        begins[one.run] = min(one.begin, begins.get(one.run, one.begin))
    return [_moved(one, begins[one.run]) for one in timelines]


def by_group(timelines: Iterable[Timeline]) -> dict[str, list[Timeline]]:
    """Return the timelines of each group; groups and jobs by name."""
    groups: dict[str, list[Timeline]] = {}
    for one in sorted(timelines, key=lambda one: (one.group, one.name)):
        groups.setdefault(one.group, []).append(one)
    return groups


def merged(group: str, timelines: Sequence[Timeline]) -> Timeline:
    """Return one timeline of a group: a lane is busy while it is busy for any of its jobs."""
    lanes = {lane: _joined(one.lanes()[lane] for one in timelines) for lane in LANES}
    begin, end = min(one.begin for one in timelines), max(one.end for one in timelines)
    return Timeline(group, begin, end, **lanes, run=timelines[0].run, group=group)


def num_busy(timelines: Iterable[Timeline], lane: str, length_s: float, num_windows: int) -> list[float]:
    """Return for each window the mean number of jobs for which the lane was busy. Timelines begin at 0."""
    window_s = length_s / num_windows
    found = [0.0] * num_windows
    for one in timelines:
        for begin, end in one.lanes()[lane] or ():
            for number in range(int(begin / window_s), min(num_windows - 1, int(end / window_s)) + 1):
                inside = min(end, (number + 1) * window_s) - max(begin, number * window_s)
                found[number] += inside / window_s
    return found


def busy_share(timelines: Iterable[Timeline], lane: str, length_s: float) -> float | None:
    """Return the share of the time in which the lane was busy for at least one job; None if it is not recorded."""
    intervals = _joined(one.lanes()[lane] for one in timelines)
    return None if intervals is None else sum(end - begin for begin, end in intervals) / length_s


def _joined(lanes: Iterable[Sequence[Interval] | None]) -> tuple[Interval, ...] | None:
    known = [lane for lane in lanes if lane is not None]
    return union(interval for lane in known for interval in lane) if known else None


def _moved(one: Timeline, begin: float) -> Timeline:
    engine, environment, trainer = (
        None if lane is None else tuple((low - begin, high - begin) for low, high in lane)
        for lane in one.lanes().values()
    )
    lanes = {"engine": engine, "environment": environment, "trainer": trainer}
    return Timeline(one.name, one.begin - begin, one.end - begin, **lanes, run=one.run, group=one.group)

"""Figures of `bench replicas`, from what roles reported at two moments and from the times of commits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marlaas_api.messages import ReplicaReport


@dataclass(frozen=True)
class Observed:
    """Totals at a moment."""

    at: float
    cpu_s: float
    reports: dict[str, ReplicaReport]


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures between two moments. spread: jobs by the replica that generated most of their tokens, and agents by trainer."""

    steps_per_s: float
    tokens_per_s: float
    engines_busy: float
    trainers_busy: float
    cpu_cores: float
    spread: str


def rates(before: Observed, after: Observed, commits: Iterable[Sequence[float]]) -> Rates:
    """Return the figures. commits: times of each job's commits."""
    wall = after.at - before.at
    busy = {name: _busy(before.reports[name], after.reports[name]) for name in after.reports}
    engines, trainers = ([name for name in sorted(busy) if name.startswith(role)] for role in ("rollout", "trainer"))
    tokens = {name: _tokens(before.reports[name], after.reports[name]) for name in engines}
    jobs = Counter(homes(tokens))
    spread = " + ".join(str(jobs[name]) for name in engines)
    bound = " + ".join(str(len(after.reports[name].bound)) for name in trainers)
    return Rates(
        sum(_rate([at for at in times if before.at <= at <= after.at]) for times in commits),
        sum(sum(tokens[name].values()) / _wall(before.reports[name], after.reports[name]) for name in engines),
        sum(busy[name] for name in engines) / len(engines),
        sum(busy[name] for name in trainers) / len(trainers),
        (after.cpu_s - before.cpu_s) / wall,
        f"{spread} / {bound}",
    )


def homes(tokens: dict[str, dict[str, int]]) -> list[str]:
    """Return for each job the replica that generated most of its tokens. tokens: by replica and job uid."""
    uids = {uid for one in tokens.values() for uid in one}
    return [max(tokens, key=lambda name: tokens[name].get(uid, 0)) for uid in uids]


def _tokens(before: ReplicaReport, after: ReplicaReport) -> dict[str, int]:
    grown = {uid: total - before.job_tokens.get(uid, 0) for uid, total in after.job_tokens.items()}
    return {uid: number for uid, number in grown.items() if number}


def _rate(times: Sequence[float]) -> float:
    """Return events per second between the first and the last, because jobs that commit in turns make bursts of events."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def _wall(before: ReplicaReport, after: ReplicaReport) -> float:
    return after.wall_s - before.wall_s


def _busy(before: ReplicaReport, after: ReplicaReport) -> float:
    return (after.busy_s - before.busy_s) / _wall(before, after)

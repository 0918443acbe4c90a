"""Figures of `bench multitenant`, computed from the raw events of a run. Pure, except for `load`."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.multitenant_engine import EngineTotals, read_totals
from marlaas.episodes.files import read
from marlaas.episodes.record import EpisodeRecord, TurnRecord


@dataclass(frozen=True, slots=True)
class JobEvents:
    """Raw events of one job. steps: unix time of each finished step, in order. episodes: of training and evaluation."""

    tenant: str
    steps: tuple[float, ...]
    episodes: tuple[EpisodeRecord, ...]
    evals: tuple[float, ...] = ()

    @property
    def begin(self) -> float:
        """Unix time at which its first turn began to wait for the engine."""
        return min(turn.at - turn.engine_s - turn.queue_s for episode in self.episodes for turn in episode.turns)

    @property
    def end(self) -> float:
        """Unix time of its last step."""
        return self.steps[-1]


@dataclass(frozen=True, slots=True)
class Events:
    """Raw events of a run. usage: lines of `usage.jsonl`. engine: of all replicas. command_at: unix time of `marlaas run`'s begin.

    Of runs that were kept before these were recorded, `engine` and `command_at` are None.
    """

    jobs: dict[str, JobEvents]
    usage: tuple[dict[str, Any], ...] = ()
    engine: EngineTotals | None = None
    command_at: float | None = None

    @property
    def begin(self) -> float:
        """Unix time at which the first turn of any job began to wait for the engine."""
        return min(job.begin for job in self.jobs.values())

    @property
    def end(self) -> float:
        """Unix time of the last step of any job."""
        return max(job.end for job in self.jobs.values())


def load(folder: Path) -> Events:
    """Read the events of a run's folder. Jobs without a step or an episode, of a run that was stopped, are left out."""
    jobs = {}
    for path in sorted((folder / "run").glob("*/*/steps.jsonl")):
        steps = tuple(json.loads(line)["at"] for line in path.read_text().splitlines())
        evals = tuple(json.loads(line)["reward_mean"] for line in _lines(path.with_name("evals.jsonl")))
        tenant, episodes = path.parent.parent.name, tuple(read(path.parent))
        if steps and episodes:
            jobs[f"{tenant}/{path.parent.name}"] = JobEvents(tenant, steps, episodes, evals)
    usage = tuple(json.loads(line) for line in _lines(folder / "usage.jsonl"))
    done = folder / "done.json"
    command_at = json.loads(done.read_text()).get("began_at") if done.exists() else None
    return Events(jobs, usage, read_totals(folder / "run" / ".state" / "logs"), command_at)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def num_steps(events: Events) -> int:
    """Return the number of finished steps of all jobs."""
    return sum(len(job.steps) for job in events.jobs.values())


def rate_together(events: Events) -> float:
    """Return steps per second of all jobs, from the first turn of any job to the last step of any job."""
    return num_steps(events) / (events.end - events.begin)


def rate_one_by_one(events: Events) -> float:
    """Return steps per second of jobs that ran one after another. Time between two jobs does not count."""
    return num_steps(events) / sum(job.end - job.begin for job in events.jobs.values())


def first_results_s(events: Events) -> list[float]:
    """Return each job's seconds from the run's first turn to the job's first step, sorted."""
    begin = events.begin
    return sorted(job.steps[0] - begin for job in events.jobs.values())


def start_s(events: Events) -> float | None:
    """Return the seconds from the begin of `marlaas run` to the first turn of any job; None if unknown."""
    return None if events.command_at is None else events.begin - events.command_at


def cpu_s(events: Events) -> dict[str, float]:
    """Return the processor seconds of each role between the run's first turn and its last step."""
    first, last = _cpu_at(events.usage, events.begin), _cpu_at(events.usage, events.end)
    return {role: seconds - first.get(role, 0.0) for role, seconds in last.items()}


def start_cpu_s(events: Events) -> dict[str, float]:
    """Return the processor seconds of each role before the run's first turn."""
    return _cpu_at(events.usage, events.begin)


def _cpu_at(usage: Sequence[Mapping[str, Any]], at: float) -> dict[str, float]:
    """Return the processor seconds at a moment, between two samples on the line through them."""
    before = [sample for sample in usage if sample["at"] <= at]
    after = next((sample for sample in usage if sample["at"] > at), None)
    if after is None:
        return dict(before[-1]["cpu_s"]) if before else {}
    if not before:
        return {}
    first, last = before[-1], after
    part = (at - first["at"]) / (last["at"] - first["at"])
    sides = {role: (first["cpu_s"].get(role, 0.0), seconds) for role, seconds in last["cpu_s"].items()}
    return {role: low + part * (high - low) for role, (low, high) in sides.items()}


def memory_bytes(events: Events) -> dict[str, int]:
    """Return the peak memory of each role between the run's first turn and its last step; of a shorter time the nearest sample."""
    begin, end = events.begin, events.end
    samples = [sample for sample in events.usage if "pss_bytes" in sample]
    inside = [sample for sample in samples if begin <= sample["at"] <= end]
    middle = (begin + end) / 2
    return _peaks(inside or sorted(samples, key=lambda sample: abs(sample["at"] - middle))[:1])


def peak_memory_bytes(events: Events) -> dict[str, int]:
    """Return the peak memory of each role in the whole run, the start of the engine included."""
    return _peaks(events.usage)


def _peaks(samples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    peak: dict[str, int] = defaultdict(int)
    for sample in samples:
        for role, size in sample.get("pss_bytes", {}).items():
            peak[role] = max(peak[role], size)
    return dict(peak)


def num_turns(events: Events) -> int:
    """Return the number of turns of ended episodes."""
    return sum(1 for _ in _turns(events))


def num_episodes(events: Events) -> int:
    """Return the number of ended episodes."""
    return sum(len(job.episodes) for job in events.jobs.values())


def bound_of_others(alone: Events, num_jobs: int, rate_of_one: float, cores: int) -> float:
    """Return min(jobs × one job's own rate, cores / processor seconds of a step of jobs one after another), in steps per second.

    It is no upper bound: beside others a step costs less processor time than alone, because turns share the engine's batches.

    Args:
        alone: events of jobs one after another.
        rate_of_one: steps per second of one asynchronous job alone.
    """
    return min(num_jobs * rate_of_one, cpu_bound(alone, cores))


def cpu_bound(events: Events, cores: int) -> float:
    """Return cores / processor seconds of a step in these events: the steps per second if no core were ever idle."""
    return cores * num_steps(events) / sum(cpu_s(events).values())


def busy_share(events: Events) -> float:
    """Return the share of the time in which the engine computed at least one turn."""
    begin, end = events.begin, events.end
    spans = sorted((turn.at - turn.engine_s, turn.at) for turn in _turns(events))
    covered, until = 0.0, begin
    for start, stop in spans:
        covered += max(0.0, min(stop, end) - max(start, until))
        until = max(until, min(stop, end))
    return covered / (end - begin)


def occupancy(events: Events) -> float:
    """Return the mean number of turns that the engine computed at once, while it computed any."""
    return sum(turn.engine_s for turn in _turns(events)) / (busy_share(events) * (events.end - events.begin))


def num_queued(events: Events) -> float:
    """Return the mean number of turns that waited for the engine, in the rollout role's queue or for a slot."""
    return sum(turn.queue_s for turn in _turns(events)) / (events.end - events.begin)


def reload_shares(events: Events) -> tuple[float, float] | None:
    """Return the time of re-loads of adapters as shares: of the engine's time, and of the time in which it computed turns.

    First loads do not count. None if unknown.
    """
    if events.engine is None:
        return None
    share = events.engine.reload_s / (events.end - events.begin)
    return share, share / busy_share(events)


def _turns(events: Events) -> Iterable[TurnRecord]:
    return (turn for job in events.jobs.values() for episode in job.episodes for turn in episode.turns)


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

"""What a job will take, from the rates of jobs that have ended on this machine: tokens, seconds, and seconds of engine and trainer.

Each run of `marlaas run` adds the rates of its succeeded jobs to a file in the user's cache. An estimate takes the newest rates of the same
base model, engine, mode (strict or not), environments, agents and length of replies. Without such rates it is an upper bound of the tokens.

Jobs that ran together divided the machine, so a job's seconds are divided by their number, and jobs that will run together take the sum.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from marlaas.local.results import JobResult
from marlaas.local.table import duration
from marlaas.models.cache import cache_folder
from marlaas.models.memory import has_gpu
from marlaas_api.messages import JobDocument, JobSpec, Phase
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_api.messages.usage import UsageAmounts

MAX_RATES = 200
_SECONDS_PER_HOUR = 3600.0


class Like(BaseModel):
    """What rates depend on. tasks: digest of the environments, with their arguments, of training and of suites."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    machine: str
    model: str
    engine: str
    tasks: str
    is_strict: bool
    num_agents: int
    max_tokens: int
    max_turns: int


class Work(BaseModel):
    """What one episode or row takes. tokens: generated ones, of all agents. seconds: of the run, as if the job were alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    tokens: float = 0.0
    seconds: float = 0.0
    engine_s: float = 0.0
    trainer_s: float = 0.0

    def times(self, factor: float) -> "Work":
        """Return the work of that many."""
        return Work(
            tokens=factor * self.tokens,
            seconds=factor * self.seconds,
            engine_s=factor * self.engine_s,
            trainer_s=factor * self.trainer_s,
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            engine_s=self.engine_s + other.engine_s,
            trainer_s=self.trainer_s + other.trainer_s,
        )


class Rates(BaseModel):
    """Rates of a job that has succeeded. None: it had no such part.

    at: unix seconds. demonstration: of a row. training, evaluation: of an episode, with those that trained nothing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    like: Like
    at: float
    demonstration: Work | None = None
    training: Work | None = None
    evaluation: Work | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job takes. rows: demonstrations. work: None if it is not known. most_tokens: every reply as long as it may be.

    at: when the rates were measured, in unix seconds.
    """

    job: str
    rows: int
    episodes: int
    evaluated: int
    most_tokens: int
    gpus: int = 0
    work: Work | None = None
    at: float = 0.0


def like(job: JobDocument, pool: PoolSpec) -> Like:
    """Return what the rates of a job depend on. pool: of its first policy."""
    spec = job.spec
    environments = [(spec.environment.image, spec.environment.name, spec.environment.args.value)]
    environments += [
        (None, one.environment.name, one.environment.args.value)
        for one in spec.evaluation.suites
        if one.environment is not None
    ]
    return Like(
        machine=f"{os.cpu_count()} CPUs{', a GPU' if has_gpu() else ''}",
        model=pool.model.model_dump_json(exclude_none=True),
        engine=f"{pool.rollout.engine} x{pool.rollout.replicas}, trainers x{pool.trainer.replicas}",
        tasks=hashlib.sha256(json.dumps(environments, sort_keys=True).encode()).hexdigest()[:16],
        is_strict=spec.training.max_staleness == 0,
        num_agents=len(spec.agents),
        max_tokens=spec.rollout.max_tokens,
        max_turns=spec.rollout.max_turns,
    )


def measured(result: JobResult, pool: PoolSpec, num_jobs: int, now: float) -> Rates | None:
    """Return the rates of a job; None if it has not succeeded. num_jobs: that ran together. now: unix seconds.

    The time for which the job was admitted is divided among training and evaluations by the seconds that engine and trainer worked for
    each, because they go on at the same time.
    """
    progress, spec = result.progress, result.document.spec
    if result.phase is not Phase.SUCCEEDED or progress is None:
        return None
    sampled = [step for step in result.steps if not step.is_demonstrated]
    demonstrated = [step for step in result.steps if step.is_demonstrated]
    row_s = min(sum(one.wall_s for one in demonstrated), progress.admitted_s)
    trained, evaluated = _sum(one.usage for one in sampled), _sum(one.usage for one in result.evals)
    busy_s = trained.engine_s + trained.trainer_s + evaluated.engine_s
    stretch = (progress.admitted_s - row_s) / busy_s if busy_s else 0.0
    num = {
        "demonstration": len(demonstrated) * spec.rows_per_step,
        "training": len(sampled) * spec.training.groups_per_step * spec.group_size,
        "evaluation": len(result.evals) * spec.evaluation.num_episodes,
    }
    work = {
        "demonstration": Work(seconds=row_s, trainer_s=_sum(one.usage for one in demonstrated).trainer_s),
        "training": _work(trained, stretch),
        "evaluation": _work(evaluated, stretch),
    }
    alone = {
        part: one.model_copy(update={"seconds": one.seconds / num_jobs}).times(1 / num[part])
        for part, one in work.items()
        if num[part]
    }
    return Rates(like=like(result.document, pool), at=now, **alone)


def estimate(job: JobDocument, pool: PoolSpec, known: Sequence[Rates]) -> Estimate:
    """Return what a job takes alone, from the newest rates that are like it and have all its parts. pool: of its first policy."""
    spec, wanted = job.spec, like(job, pool)
    num_demonstrated = min(spec.demonstrated_steps, spec.training.steps)
    num_evaluations = _num_evaluations(spec)
    num = {
        "demonstration": num_demonstrated * spec.rows_per_step,
        "training": (spec.training.steps - num_demonstrated) * spec.training.groups_per_step * spec.group_size,
        "evaluation": num_evaluations * spec.evaluation.num_episodes,
    }
    most = num["training"] * spec.rollout.max_tokens
    most += num_evaluations * sum(
        suite.tasks * suite.samples * (suite.max_tokens or spec.rollout.max_tokens) for suite in spec.evaluation.plan
    )
    found = Estimate(
        str(job.ref),
        rows=num["demonstration"],
        episodes=num["training"],
        evaluated=num["evaluation"],
        most_tokens=most * spec.rollout.max_turns * len(spec.agents),
        gpus=pool.rollout.gpus * pool.rollout.replicas + pool.trainer.gpus * pool.trainer.replicas,
    )
    for rates in sorted(known, key=lambda one: one.at, reverse=True):
        parts = {part: getattr(rates, part) for part, number in num.items() if number}
        if rates.like == wanted and None not in parts.values():
            work = sum((one.times(num[part]) for part, one in parts.items()), Work())
            return replace(found, work=work, at=rates.at)
    return found


def lines(estimates: Sequence[Estimate]) -> Iterator[str]:
    """Yield the estimates for people: a line for each job, and one for all together if there are several."""
    for one in estimates:
        yield f"estimate of {one.job}: {_amounts(one)}; {_time(one)}"
    seconds = total_s(estimates)
    if len(estimates) > 1 and seconds is not None:
        yield f"estimate of all {len(estimates)} jobs together: {duration(seconds)}"


def total_s(estimates: Sequence[Estimate]) -> float | None:
    """Return the seconds of jobs that run together; None if those of one are not known."""
    known = [one.work.seconds for one in estimates if one.work is not None]
    return sum(known) if known and len(known) == len(estimates) else None


def facts(one: Estimate) -> dict[str, object]:
    """Return an estimate for JSON."""
    work = one.work
    return {
        "demonstrations": one.rows,
        "episodes": one.episodes,
        "evaluationEpisodes": one.evaluated,
        "tokens": one.most_tokens if work is None else round(work.tokens),
        "isUpperBound": work is None,
        "seconds": None if work is None else work.seconds,
        "engineSeconds": None if work is None else work.engine_s,
        "trainerSeconds": None if work is None else work.trainer_s,
    }


def read() -> list[Rates]:
    """Return the rates that runs on this machine have left, the oldest first. Lines of another release are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in _file().read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValidationError):
                found.append(Rates.model_validate_json(line))
    return found


def add(rates: Iterable[Rates]) -> None:
    """Add rates, and drop the oldest above `MAX_RATES`. A cache that cannot be written is left as it is."""
    kept = [*read(), *rates][-MAX_RATES:]
    with contextlib.suppress(OSError):
        file = _file()
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(f"{one.model_dump_json()}\n" for one in kept), "utf-8")
        partial.replace(file)


def _file() -> Path:
    return cache_folder() / "rates.jsonl"


def _num_evaluations(spec: JobSpec) -> int:
    """Return how many versions are evaluated: the first, those after every `every` steps, that after the demonstrations, and the last."""
    steps, every = spec.training.steps, spec.evaluation.every
    others = {step for step in (spec.demonstrated_steps, steps) if step <= steps and step % every}
    return (steps // every + 1 + len(others)) if spec.evaluation.plan else 0


def _amounts(one: Estimate) -> str:
    parts = [
        *([f"{one.rows:,} demonstrations"] if one.rows else []),
        *([f"{one.episodes:,} training episodes"] if one.episodes else []),
        *([f"{one.evaluated:,} held-out episodes"] if one.evaluated else []),
    ]
    tokens = (
        f"at most {one.most_tokens:,} tokens" if one.work is None else f"about {_rounded(one.work.tokens):,} tokens"
    )
    return ", ".join([*parts, *([tokens] if one.episodes or one.evaluated else [])]) or "nothing to play"


def _time(one: Estimate) -> str:
    if one.work is None:
        return (
            "its time is not known, as no job like it (base model, engine, environment and its arguments, maxTokens, maxTurns) has ended on "
            "this machine; a run of a few steps measures it"
        )
    busy = f"engine {duration(one.work.engine_s)}, trainer {duration(one.work.trainer_s)}"
    hours = f", {one.gpus * one.work.seconds / _SECONDS_PER_HOUR:.2g} accelerator-hours" if one.gpus else ""
    day = time.strftime("%Y-%m-%d", time.localtime(one.at))
    return f"{duration(one.work.seconds)} alone ({busy}{hours}), as measured on {day}"


def _rounded(number: float) -> int:
    """Return a number with two significant digits."""
    if number < 1:
        return 0
    return int(round(number, 1 - math.floor(math.log10(number))))


def _work(usage: UsageAmounts, stretch: float) -> Work:
    busy_s = usage.engine_s + usage.trainer_s
    tokens = usage.generated_tokens
    return Work(tokens=tokens, seconds=stretch * busy_s, engine_s=usage.engine_s, trainer_s=usage.trainer_s)


def _sum(usages: Iterable[Mapping[str, UsageAmounts]]) -> UsageAmounts:
    total = UsageAmounts()
    for usage in usages:
        for one in usage.values():
            total = total + one
    return total

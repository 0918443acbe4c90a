"""What a job will take, from the rates of jobs that have ended on this machine: tokens, seconds, and seconds of engine and trainer.

Each run of `marlaas run` adds the rates of its succeeded jobs to a file in the user's cache. An estimate takes the newest rates of the same
base model, engine, mode (strict or not), environment and length of replies. Without such rates it is an upper bound of the tokens.

Jobs that ran together divided the machine, so a job's seconds are divided by their number, and jobs that will run together take the sum.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """What rates depend on. environment: its name, or image."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    machine: str
    model: str
    engine: str
    is_strict: bool
    environment: str
    max_tokens: int
    max_turns: int

    def is_near(self, other: "Like") -> bool:
        """Return whether rates by token are comparable; the lengths of episodes may not be."""
        mine, others = ((one.machine, one.model, one.engine, one.is_strict) for one in (self, other))
        return mine == others


class Rates(BaseModel):
    """Rates of a job that has succeeded. Tokens are generated ones, of all agents, with those that trained nothing.

    at: unix seconds. row_s: seconds for a demonstrated row. token_s, evaluated_token_s: seconds of the run for a token of training, and of
    evaluations. engine_s: for any token. trainer_s: for a token of training.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    like: Like
    at: float
    episode_tokens: float
    evaluated_tokens: float
    row_s: float
    token_s: float
    evaluated_token_s: float
    engine_s: float
    trainer_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job takes alone. tokens: at most, if the seconds are not known. at: when the rates were measured; None: they are not known."""

    job: str
    episodes: int
    evaluated: int
    rows: int
    tokens: float
    seconds: float | None = None
    engine_s: float = 0.0
    trainer_s: float = 0.0
    gpus: int = 0
    at: float | None = None


def like(job: JobDocument, pool: PoolSpec) -> Like:
    """Return what the rates of a job depend on. pool: of its first policy."""
    spec = job.spec
    return Like(
        machine=f"{os.cpu_count()} CPUs{', a GPU' if has_gpu() else ''}",
        model=pool.model.model_dump_json(exclude_none=True),
        engine=f"{pool.rollout.engine} x{pool.rollout.replicas}, trainers x{pool.trainer.replicas}",
        is_strict=spec.training.max_staleness == 0,
        environment=spec.environment.name or spec.environment.image or "",
        max_tokens=spec.rollout.max_tokens,
        max_turns=spec.rollout.max_turns,
    )


def measured(result: JobResult, pool: PoolSpec, num_jobs: int, now: float) -> Rates | None:
    """Return the rates of a job; None if it has not succeeded or trained nothing. num_jobs: that ran together. now: unix seconds."""
    progress, spec = result.progress, result.document.spec
    sampled = [step for step in result.steps if not step.is_demonstrated]
    if result.phase is not Phase.SUCCEEDED or progress is None or not result.steps:
        return None
    demonstrated = [step for step in result.steps if step.is_demonstrated]
    trained, evaluated = _sum(one.usage for one in sampled), _sum(one.usage for one in result.evals)
    sampled_s, demonstrated_s = (sum(one.wall_s for one in steps) for steps in (sampled, demonstrated))
    rest_s = max(0.0, progress.admitted_s - sampled_s - demonstrated_s)
    num_episodes = len(sampled) * spec.training.groups_per_step * spec.group_size
    num_rows = len(demonstrated) * spec.rows_per_step
    num_evaluated = len(result.evals) * spec.evaluation.num_episodes
    with contextlib.suppress(ValidationError):
        return Rates(
            like=like(result.document, pool),
            at=now,
            episode_tokens=_ratio(trained.generated_tokens, num_episodes),
            evaluated_tokens=_ratio(evaluated.generated_tokens, num_evaluated),
            row_s=_ratio(demonstrated_s, num_rows * num_jobs),
            token_s=_ratio(sampled_s, trained.generated_tokens * num_jobs),
            evaluated_token_s=_ratio(rest_s, evaluated.generated_tokens * num_jobs),
            engine_s=_ratio(
                trained.engine_s + evaluated.engine_s, trained.generated_tokens + evaluated.generated_tokens
            ),
            trainer_s=_ratio(trained.trainer_s, trained.generated_tokens),
        )
    return None


def estimate(job: JobDocument, pool: PoolSpec, known: Sequence[Rates]) -> Estimate:
    """Return what a job takes alone, from the newest rates that are like it. pool: of its first policy."""
    spec, wanted = job.spec, like(job, pool)
    episodes = (spec.training.steps - min(spec.demonstrated_steps, spec.training.steps)) * (
        spec.training.groups_per_step * spec.group_size
    )
    rows = min(spec.demonstrated_steps, spec.training.steps) * spec.rows_per_step
    evaluated = _num_evaluations(spec) * spec.evaluation.num_episodes
    gpus = pool.rollout.gpus * pool.rollout.replicas + pool.trainer.gpus * pool.trainer.replicas
    newest = sorted(known, key=lambda one: one.at)
    exact = next((one for one in reversed(newest) if one.like == wanted), None)
    rates = exact or next((one for one in reversed(newest) if one.like.is_near(wanted)), None)
    longest = spec.rollout.max_tokens * spec.rollout.max_turns
    trained_tokens = episodes * (longest if exact is None else exact.episode_tokens)
    evaluated_tokens = evaluated * (longest if exact is None else exact.evaluated_tokens)
    tokens = trained_tokens + evaluated_tokens
    found = Estimate(str(job.ref), episodes, evaluated, rows, tokens, gpus=gpus)
    if rates is None or exact is None:
        return found
    seconds = rows * rates.row_s + trained_tokens * rates.token_s + evaluated_tokens * rates.evaluated_token_s
    engine_s, trainer_s = tokens * rates.engine_s, trained_tokens * rates.trainer_s
    return Estimate(str(job.ref), episodes, evaluated, rows, tokens, seconds, engine_s, trainer_s, gpus, rates.at)


def lines(estimates: Sequence[Estimate]) -> Iterator[str]:
    """Yield the estimates for people: a line for each job, and one for all together if there are several."""
    for one in estimates:
        yield f"estimate of {one.job}: {_amounts(one)}; {_time(one)}"
    seconds = total_s(estimates)
    if len(estimates) > 1 and seconds is not None:
        yield f"estimate of all {len(estimates)} jobs together: {duration(seconds)}"


def total_s(estimates: Sequence[Estimate]) -> float | None:
    """Return the seconds of jobs that run together; None if those of one are not known."""
    known = [one.seconds for one in estimates if one.seconds is not None]
    return sum(known) if known and len(known) == len(estimates) else None


def facts(one: Estimate) -> dict[str, object]:
    """Return an estimate for JSON."""
    return {
        "episodes": one.episodes,
        "evaluationEpisodes": one.evaluated,
        "demonstrations": one.rows,
        "tokens": round(one.tokens),
        "isUpperBound": one.seconds is None,
        "seconds": one.seconds,
        "engineSeconds": one.engine_s if one.seconds is not None else None,
        "trainerSeconds": one.trainer_s if one.seconds is not None else None,
    }


def read() -> list[Rates]:
    """Return the rates that runs on this machine have left, the oldest first. Lines of another release are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in _file().read_text("utf-8").splitlines():
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
    """Return how many versions are evaluated."""
    steps = spec.training.steps
    marks = {*range(0, steps + 1, spec.evaluation.every), spec.demonstrated_steps, steps}
    return sum(spec.evaluates(step) for step in marks if step <= steps)


def _amounts(one: Estimate) -> str:
    parts = [
        *([f"{one.rows:,} demonstrations"] if one.rows else []),
        *([f"{one.episodes:,} training episodes"] if one.episodes else []),
        *([f"{one.evaluated:,} held-out episodes"] if one.evaluated else []),
    ]
    bound = "at most" if one.seconds is None else "about"
    tokens = [f"{bound} {_rounded(one.tokens):,} tokens"] if one.episodes or one.evaluated else []
    return ", ".join([*parts, *tokens]) or "nothing to play"


def _time(one: Estimate) -> str:
    if one.seconds is None or one.at is None:
        return (
            "its time is not known, as no job like it (base model, engine, environment, maxTokens, maxTurns) has ended on this machine; "
            "a run of a few steps measures it"
        )
    busy = f"engine {duration(one.engine_s)}, trainer {duration(one.trainer_s)}"
    hours = f", {one.gpus * one.seconds / _SECONDS_PER_HOUR:.2g} accelerator-hours" if one.gpus else ""
    day = time.strftime("%Y-%m-%d", time.localtime(one.at))
    return f"{duration(one.seconds)} alone ({busy}{hours}), as measured on {day}"


def _rounded(number: float) -> int:
    """Return a number with two significant digits."""
    if number < 1:
        return 0
    return int(round(number, 1 - math.floor(math.log10(number))))


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else 0.0


def _sum(usages: Iterable[Mapping[str, UsageAmounts]]) -> UsageAmounts:
    total = UsageAmounts()
    for usage in usages:
        for one in usage.values():
            total = total + one
    return total

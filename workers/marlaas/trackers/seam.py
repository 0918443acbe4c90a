"""Interface to trackers, its fake, the package that each tracker needs, and the rows of metrics that they receive.

Rows have names that trackers group well. `finished` counts finished steps: the evaluation before training is at 0,
the first step at 1. NaN and infinite values are left out.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.export import Tracker as Name
from marlaas_api.messages import EvalRecord, EvalSample, JobDocument, Phase, Progress, StepRecord, SuiteResult

_NOT_ALLOWED = re.compile(r"[^\w\-./ ]")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metrics of one record. `key` is unique in its job; `at` is in unix seconds. samples: held-out episodes for people to read.

    data_digest: SHA-256 of the data sets that were played, several with commas; empty: none.
    """

    key: str
    finished: int
    at: float
    values: Mapping[str, float]
    samples: Sequence[EvalSample] = ()
    data_digest: str = ""

    @property
    def table(self) -> tuple[list[str | int], list[list[object]]]:
        """Columns and rows of the samples, as tables of trackers take them."""
        columns: list[str | int] = ["suite", "task", "prompt", "reply", "reward"]
        return columns, [[one.suite, one.index, one.prompt, one.reply, one.reward] for one in self.samples]


def row_of(record: StepRecord | EvalRecord) -> MetricRow:
    """Return a record as a row."""
    return _step_row(record) if isinstance(record, StepRecord) else _eval_row(record)


def rows(steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> list[MetricRow]:
    """Return all records as rows, in the order of time."""
    found = [*map(_step_row, steps), *map(_eval_row, evals)]
    return sorted(found, key=lambda row: (row.finished, row.key.startswith("eval")))


def settings(document: JobDocument) -> dict[str, object]:
    """Return the job's spec as flat pairs, such as `training.optimizer.learningRate`."""
    return dict(_flat(document.spec.model_dump(mode="json", by_alias=True, exclude_none=True)))


def _step_row(step: StepRecord) -> MetricRow:
    values = {
        **({} if step.is_demonstrated else {"reward/train": step.reward_mean}),
        "reward/train_deviation": step.reward_std,
        "staleness/mean": step.staleness_mean,
        "staleness/max": step.staleness_max,
        "step/seconds": step.wall_s,
        "step/groups": step.num_groups,
        "step/episodes": step.num_episodes,
        "step/zero_variance": step.num_zero_variance,
        "step/dropped": step.num_dropped,
        "step/version": step.version,
        **_agents_of(step),
        **{f"faults/{name}": count for name, count in step.faults.items()},
        **{f"train/{name}": value for name, value in step.metrics.items()},
    }
    digest = ",".join(step.plays.data_digests)
    return MetricRow(f"step {step.step}", step.step + 1, step.at, _finite(values.items()), data_digest=digest)


def _agents_of(step: StepRecord) -> dict[str, float]:
    """Return reward and version of each agent, if there are several."""
    if len(step.agents) < 2:
        return {}
    rewards = {f"reward/train/{agent}": one.reward_mean for agent, one in step.agents.items()}
    versions = {f"step/version/{agent}": float(one.version) for agent, one in step.agents.items()}
    return {name: reward for name, reward in rewards.items() if reward is not None} | versions


def _eval_row(record: EvalRecord) -> MetricRow:
    metrics = ((f"held_out/{name}", value) for name, value in record.metrics.items())
    agents = record.rewards.items() if len(record.rewards) > 1 else ()
    rewards = ((f"reward/held_out/{agent}", reward) for agent, reward in agents)
    suites = (pair for name, suite in record.suites.items() for pair in _suite(f"suite/{name}", suite))
    values = _finite([("reward/held_out", record.reward_mean), *rewards, *metrics, *suites])
    digest = ",".join(record.data_digests)
    return MetricRow(f"eval {record.version}", record.step, record.at, values, record.samples, digest)


def _suite(name: str, suite: SuiteResult) -> Iterator[tuple[str, float]]:
    yield f"{name}/reward", suite.reward_mean
    if suite.standard_error is not None:
        yield f"{name}/standard_error", suite.standard_error
    if suite.majority is not None:
        yield f"{name}/majority", suite.majority
    yield from ((f"{name}/pass_at_{k}", value) for k, value in suite.pass_at.items())
    yield from ((f"{name}/{metric}", value) for metric, value in suite.metrics.items())


def _finite(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {_NOT_ALLOWED.sub("_", name): float(value) for name, value in values if math.isfinite(value)}


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    elif value != {}:
        yield path, value


_PACKAGES: dict[Name, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_GATEWAYS: dict[Name, str] = {
    "tensorboard": "marlaas.trackers.tensorboard_gateway",
    "wandb": "marlaas.trackers.wandb_gateway",
    "mlflow": "marlaas.trackers.mlflow_gateway",
    "trackio": "marlaas.trackers.trackio_gateway",
}


DATA = "data.sha256"
"""Name of `MetricRow.data_digest` beside the settings."""


class End(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DELETED = "deleted"

    @classmethod
    def of(cls, progress: Progress) -> "End | None":
        """Return the end in a job's progress; None while it goes on."""
        return {Phase.SUCCEEDED: cls.SUCCEEDED, Phase.FAILED: cls.FAILED}.get(progress.phase)


class Tracker(Protocol):
    """One job's run in one tracker. Called from one thread. Exceptions of the library are not caught."""

    @property
    def where(self) -> str:
        """Where to view it, as text for users."""
        ...

    def has(self, number: int, row: MetricRow) -> bool:
        """Return whether an earlier process has delivered the row, as far as the tracker can say."""
        ...

    def log(self, number: int, row: MetricRow) -> None:
        """Deliver one row. `number` counts the job's rows from 0, also across restarts."""
        ...

    def close(self, end: End | None) -> None:
        """Flush and close. `end`: how the job ended; None: this process ends, and the job goes on."""
        ...


Open = Callable[[Name, JobDocument, Path], Tracker]
"""Open or resume a job's run in a tracker, which may keep its files in the folder."""


@dataclass(slots=True)
class MemoryTracker:
    """Fake tracker that keeps its rows. The call with number `fails_at` raises OSError."""

    rows: list[tuple[int, MetricRow]] = field(default_factory=list)
    closed: list[End | None] = field(default_factory=list)
    fails_at: int | None = None

    @property
    def where(self) -> str:
        return "memory"

    def log(self, number: int, row: MetricRow) -> None:
        if number == self.fails_at:
            raise OSError("no route to host")
        self.rows.append((number, row))

    def has(self, number: int, row: MetricRow) -> bool:
        return any(known.key == row.key for _, known in self.rows)

    def close(self, end: End | None) -> None:
        self.closed.append(end)


def open_tracker(name: Name, document: JobDocument, folder: Path) -> Tracker:
    """Open a job's run in a real tracker. Raises the library's exceptions."""
    tracker: Tracker = import_module(_GATEWAYS[name]).open_tracker(document, folder)
    return tracker


def require(jobs: Iterable[JobDocument]) -> None:
    """Raise InvalidInput if a job names a tracker whose library is not installed, or trackio without a server."""
    for job in jobs:
        for name in job.spec.export.trackers:
            if name == "trackio":
                import_module(_GATEWAYS[name]).required()
                continue
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise InvalidInput(
                    f"job {job.ref}: spec.export.trackers asks for {name}, and {_PACKAGES[name]} is not installed: "
                    f"pip install 'marlaas[trackers]', or remove {name}"
                )

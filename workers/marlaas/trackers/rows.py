"""Convert records to rows of metrics, with names that trackers group well. Pure.

`finished` counts finished steps: the evaluation before training is at 0, the first step at 1. NaN and infinite
values are left out.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.messages import EvalRecord, JobDocument, StepRecord

_NOT_ALLOWED = re.compile(r"[^\w\-./ ]")


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metrics of one record. `key` is unique in its job; `at` is in unix seconds."""

    key: str
    finished: int
    at: float
    values: Mapping[str, float]


def rows(steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> list[MetricRow]:
    """Return all records as rows, in the order of time."""
    found = [*map(_step_row, steps), *map(_eval_row, evals)]
    return sorted(found, key=lambda row: (row.finished, row.key.startswith("eval")))


def settings(document: JobDocument) -> dict[str, object]:
    """Return the job's spec as flat pairs, such as `training.optimizer.learningRate`."""
    return dict(_flat(document.spec.model_dump(mode="json", by_alias=True, exclude_none=True)))


def _step_row(step: StepRecord) -> MetricRow:
    values = {
        "reward/train": step.reward_mean,
        "reward/train_deviation": step.reward_std,
        "staleness/mean": step.staleness_mean,
        "staleness/max": step.staleness_max,
        "step/seconds": step.wall_s,
        "step/groups": step.num_groups,
        "step/episodes": step.num_episodes,
        "step/zero_variance": step.num_zero_variance,
        "step/dropped": step.num_dropped,
        "step/version": step.version,
        **{f"faults/{name}": count for name, count in step.faults.items()},
        **{f"train/{name}": value for name, value in step.metrics.items()},
    }
    return MetricRow(f"step {step.step}", step.step + 1, step.at, _told(values.items()))


def _eval_row(record: EvalRecord) -> MetricRow:
    metrics = ((f"held_out/{name}", value) for name, value in record.metrics.items())
    values = _told([("reward/held_out", record.reward_mean), *metrics])
    return MetricRow(f"eval {record.version}", record.step, record.at, values)


def _told(values: Iterable[tuple[str, float]]) -> dict[str, float]:
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

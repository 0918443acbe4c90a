"""Totals of a job over its recorded steps and evaluations. Each record counts once."""

from collections import Counter
from collections.abc import Iterable

from marlaas_api.messages import EvalRecord, StepRecord, UsageAmounts
from marlaas_api.messages.usage import merged

TRAINING_FAULTS = {"out-of-memory": "out_of_memory", "non-finite": "skipped_update"}
"""Classes of `Progress.training_faults`, and the step metrics in which the trainer counts them."""


class RecordedTotals:
    """Faults, skipped visits, seconds of the trainer, and usage by agent."""

    def __init__(self, steps: Iterable[StepRecord], evaluations: Iterable[EvalRecord]) -> None:
        self.faults: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.training_faults: Counter[str] = Counter()
        self.trainer_s = 0.0
        self.usage: dict[str, UsageAmounts] = {}
        for step in steps:
            self.add_step(step)
        for evaluation in evaluations:
            self.add_evaluation(evaluation)

    def add_step(self, record: StepRecord) -> None:
        """Add a recorded step."""
        self.faults.update(record.faults)
        self.skips.update(solved=record.skipped_solved, hopeless=record.skipped_hopeless)
        self.training_faults += Counter({name: int(record.metric(metric)) for name, metric in TRAINING_FAULTS.items()})
        self.trainer_s += record.metric("train_s")
        self.usage = merged(self.usage, record.usage)

    def add_evaluation(self, record: EvalRecord) -> None:
        """Add a recorded evaluation."""
        self.faults.update(record.faults)
        self.usage = merged(self.usage, record.usage)

"""The records of a job, and totals over its recorded steps and evaluations. Each record counts once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api.messages import EvalRecord, GroupLogEntry, IssueLedger, PolicyRecord, StepRecord, UsageAmounts
from marlaas_api.messages.usage import merged

TRAINING_FAULTS = {"out-of-memory": "out_of_memory", "non-finite": "skipped_update"}
"""Classes of `Progress.training_faults`, and the step metrics in which the trainer counts them."""


@dataclass(frozen=True, slots=True)
class History:
    """The records of a job in streams and buckets, read when the orchestrator takes up the job. policies: by agent."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvalRecord, ...] = ()
    groups: tuple[GroupLogEntry, ...] = ()
    ledger: IssueLedger | None = None
    policies: Mapping[str, PolicyRecord] = field(default_factory=dict)


class RecordedTotals:
    """Faults, skipped visits, seconds of the trainer, and usage by agent.

    untrained: by agent, its steps without a new version, by the cause of most of their groups.
    """

    def __init__(self, steps: Iterable[StepRecord], evaluations: Iterable[EvalRecord]) -> None:
        self.faults: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.training_faults: Counter[str] = Counter()
        self.trainer_s = 0.0
        self.usage: dict[str, UsageAmounts] = {}
        self.untrained: defaultdict[str, Counter[str]] = defaultdict(Counter)
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
        for agent, part in record.agents.items():
            if part.untrained:
                self.untrained[agent][max(part.untrained, key=part.untrained.__getitem__)] += 1

    def add_evaluation(self, record: EvalRecord) -> None:
        """Add a recorded evaluation."""
        self.faults.update(record.faults)
        self.usage = merged(self.usage, record.usage)

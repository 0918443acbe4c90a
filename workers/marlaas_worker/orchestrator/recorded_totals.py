"""The records of a job, and totals over its recorded steps and evaluations. Each record counts once."""

from collections import Counter, defaultdict
from collections.abc import Mapping
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


@dataclass(slots=True)
class RecordedTotals:
    """Totals over recorded steps and evaluations.

    Attributes:
        skips: visits to tasks that were skipped, by why.
        trainer_s: seconds that trainers computed.
        usage: by agent.
        untrained: by agent, its steps without a new version, by the cause of most of their groups.
    """

    faults: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    training_faults: Counter[str] = field(default_factory=Counter)
    trainer_s: float = 0.0
    usage: dict[str, UsageAmounts] = field(default_factory=dict)
    untrained: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @classmethod
    def of(cls, history: History) -> "RecordedTotals":
        """Return the totals of a job."""
        totals = cls()
        for step in history.steps:
            totals.add_step(step)
        for evaluation in history.evaluations:
            totals.add_evaluation(evaluation)
        return totals

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

"""One agent's task on a trainer, and the trainer's report and metrics over all of them."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marlaas_api.messages import ReplicaReport
from marlaas_worker.metrics import Sample, of_job, of_report
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.shared import TrainerDependencies
from marlaas_worker.trainer.view import PolicyEntry


@dataclass(slots=True, eq=False)
class Running:
    """An agent's task. training: None before the agent is bound. is_unwanted: whether its job no longer wants it."""

    assignment: Assignment
    task: asyncio.Task[None]
    training: AgentTrainer | None = None
    is_unwanted: bool = False

    @property
    def version(self) -> int:
        """The committed version, -1 before the first."""
        return -1 if self.training is None else self.training.lease.record.version

    def end(self) -> None:
        """Cancel the task, unless it is already releasing adapter, lease and consumer, which must not be interrupted.

        May be repeated.
        """
        if self.training is None or not self.training.is_releasing:
            self.task.cancel()

    @property
    def is_leaving(self) -> bool:
        """Whether the agent is released at its next step boundary."""
        return self.training is not None and self.training.is_leaving

    def leave(self) -> None:
        """Release the agent at its next step boundary. This cannot be revoked: else, once the first of several agents has
        left, the placement would keep the others.
        """
        if self.training is not None:
            self.training.leave()

    def lost_to(self, known: PolicyEntry | None) -> bool:
        """Return whether the policy key was deleted, or written by another trainer or for another job, after this trainer's last write.

        The cache may lag behind this trainer's own writes, so only a newer revision counts.
        """
        if self.training is None or known is None or known.entry.revision <= self.training.lease.revision:
            return False
        ours, record = self.training.lease.record, known.record
        return record is None or record.uid != ours.uid or record.epoch > ours.epoch


def bound_names(running: Iterable[Running]) -> tuple[str, ...]:
    """Return the engine names of the versions that the bound agents have."""
    found = [(one.assignment, one.version) for one in running]
    return tuple(sorted(assignment.adapter(version).engine_name for assignment, version in found if version >= 0))


def samples(dependencies: TrainerDependencies, report: ReplicaReport, running: Collection[Running]) -> list[Sample]:
    """Return the trainer's metrics."""
    found = of_report(report, {one.assignment.ref.uid: one.assignment.ref for one in running})
    counters = (
        ("marlaas_trainer_commits_total", "Versions committed.", dependencies.commits),
        (
            "marlaas_trainer_out_of_memory_total",
            "Steps restarted with a lower token budget.",
            dependencies.out_of_memory,
        ),
        (
            "marlaas_trainer_skipped_updates_total",
            "Versions with an update whose gradient was not finite.",
            dependencies.skipped,
        ),
        ("marlaas_trainer_parked_total", "Times that the agent left the memory for others.", dependencies.parked),
    )
    for one in running:
        labels = {**of_job(one.assignment.ref), "agent": one.assignment.agent.name}
        key = one.assignment.policy_key
        found += [Sample(name, "counter", text, counts[key], labels) for name, text, counts in counters]
    return found

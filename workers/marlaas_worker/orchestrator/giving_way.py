"""When an admitted job issues no tasks: its tenant is over a quota, or the job is preempted. Pure.

A preempted job stops at a step boundary: it begins no step and no evaluation, and has a limited time for its groups in
flight. Of groups that are not complete by then, the members that have not ended are played again after the next admission,
under the same pins. `metering` counts the plays that were cut, at the preemption and when their group is decided, and the job
is not charged for them.
"""

from dataclasses import dataclass

from marlaas_api.names import eval_group
from marlaas_worker.orchestrator.job_state import JobState

DRAIN_S = 30.0
"""Longest time that a preempted job has for its groups in flight."""


@dataclass(slots=True)
class Stops:
    """Reasons for which a job issues no tasks.

    Attributes:
        pauses: its tenant is over a quota; empty if not.
        gives_way: it is preempted; empty if not.
        since: when `gives_way` was set, unix seconds.
    """

    pauses: str = ""
    gives_way: str = ""
    since: float = 0.0

    def give_way(self, why: str, now: float) -> bool:
        """Set `gives_way`; empty lets the job go on. Return whether this changes anything."""
        changed = bool(why) != bool(self.gives_way)
        if changed:
            self.since = now
        self.gives_way = why
        return changed

    @property
    def any(self) -> str:
        """The first reason; empty if there is none."""
        return self.pauses or self.gives_way

    def holds_back(self, state: JobState) -> bool:
        """Return whether the job may issue no groups. A strict job that gives way still completes the step that it has begun."""
        return bool(self.pauses) or (bool(self.gives_way) and not (state.strict and state.is_mid_step))

    def is_over(self, state: JobState | None, now: float) -> bool:
        """Return whether a job that gives way may be stopped now.

        state: None while its records are not read; only they tell what the preemption would cut.
        """
        if not self.gives_way:
            return False
        return (state is not None and state.is_drained) or now - self.since >= DRAIN_S


def open_members(state: JobState) -> set[tuple[str, int]]:
    """Return the members, by group and number, that have no Episode, of undecided groups and of the evaluation in progress."""
    groups = {state.tasks.train(index).group for index in state.groups.in_flight - state.groups.complete.keys()}
    spec, run = state.document.spec, state.evaluation
    sizes = {group: spec.sampling(group).group_size for group in groups}
    members = {(group, one) for group, size in sizes.items() for one in set(range(size)).difference(state.ended(group))}
    if run is not None:
        members |= {(eval_group(state.document.ref, index, run.version), member) for index, member in run.missing()}
    return members

"""Assignment of groups to steps. Staleness is decided only here (FlexMARL: barrier-free, strongly consistent).

The version at which a step is trained is known: the committed version plus the closed steps before it. So a
group's staleness is exact when the group is assigned, and a group that would be too stale is dropped only here.
Strict mode (max_staleness 0) resolves groups in index order in rounds, so that a step depends only on seeds.
Otherwise groups are taken as they complete.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import GroupReady, StepClosed
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.experience import CompleteGroup, GroupOutcome


@dataclass(frozen=True, slots=True)
class StepRules:
    """Limits of steps.

    Attributes:
        groups_per_step: P groups in a step.
        max_staleness: in versions.
        max_refill: at most P * (1 + max_refill) groups are resolved in a step.
        steps: number of steps in all.
    """

    groups_per_step: int
    max_staleness: int
    max_refill: int
    steps: int

    @property
    def max_resolved(self) -> int:
        """Number of resolved groups after which a step closes, even if it is not full."""
        return self.groups_per_step * (1 + self.max_refill)


@dataclass(slots=True)
class StepDraft:
    """A step that is not recorded yet.

    Attributes:
        assigned: groups that the step trains, by position.
        resolved: all groups decided in the step.
        dropped: groups with signal that would have been too stale.
        logged: indices of the groups that an earlier orchestrator has logged as resolved in this step.
        silent: an earlier orchestrator closed the step without signal, and so without a log message.
    """

    step: int
    base_version: int
    assigned: list[GroupReady] = field(default_factory=list)
    resolved: list[CompleteGroup] = field(default_factory=list)
    dropped: list[CompleteGroup] = field(default_factory=list)
    closed: bool = False
    logged: frozenset[int] = frozenset()
    silent: bool = False

    @property
    def no_op(self) -> bool:
        """Whether the step was closed without signal. It counts as a step, but nothing is sent to the trainer."""
        return self.closed and not self.assigned

    def faults(self) -> Counter[str]:
        """Return the faults by class of the groups resolved in the step."""
        return sum((group.faults for group in self.resolved), Counter[str]())


class Assembly:
    """Steps of one agent that are not recorded yet, oldest first. The last one is open unless training is over."""

    def __init__(self, ref: JobRef, agent: str, rules: StepRules, recorded: int, version: int) -> None:
        self._ref = ref
        self._agent = agent
        self.rules = rules
        self.version = version
        self.drafts: list[StepDraft] = []
        self._next_step = recorded
        self._open()

    @property
    def open(self) -> StepDraft | None:
        """The step that is being filled; None once the last step is closed."""
        return self.drafts[-1] if self.drafts and not self.drafts[-1].closed else None

    def begin(self, version: int) -> None:
        """Set the agent's first version, also as base of steps that were opened before it."""
        self.version = version
        for draft in self.drafts:
            draft.base_version = max(draft.base_version, version)

    def restore(self, messages: list[GroupReady | StepClosed]) -> None:
        """Restore the assignments that an earlier orchestrator logged, in their order."""
        for message in messages:
            draft = self.open
            if draft is None or message.step < draft.step:
                continue
            while draft is not None and message.step > draft.step:
                draft.silent = True
                self._close(draft)
                draft = self.open
            if draft is None:
                return
            draft.base_version = message.base_version
            if isinstance(message, StepClosed):
                draft.logged = frozenset(message.indices)
                self._close(draft)
            elif message.position == len(draft.assigned):
                draft.assigned.append(message)

    def in_turn(self, groups: Iterable[CompleteGroup]) -> list[CompleteGroup]:
        """Return the complete groups that may be decided now.

        After a restart, groups that the log already assigns come first. While one of them waits, or while the
        open step has all its groups but is not caught up, new groups with signal wait: one more would be too
        many for the step.
        """
        waiting = list(groups)
        is_full = self.open is not None and self._missing(self.open) <= 0
        if not is_full and all(self._logged_home(group) is None for group in waiting):
            return waiting
        return [group for group in waiting if group.verdict is not GroupOutcome.SIGNAL or self._logged_home(group)]

    def resolve(self, group: CompleteGroup, version: int) -> list[GroupReady | StepClosed]:
        """Decide a complete group in the open step; return the messages to log for the trainer, in order.

        In strict mode the caller passes groups in index order. After the last step is closed, groups are
        counted in that step until it is recorded, and ignored afterwards.
        """
        draft = self._home(group, version)
        if draft is None:
            return []
        draft.resolved.append(group)
        log: list[GroupReady | StepClosed] = []
        if self._is_new_signal(draft, group):
            if draft.closed or draft.base_version - version > self.rules.max_staleness:
                draft.dropped.append(group)
            else:
                ready = self._ready(draft, group, version)
                draft.assigned.append(ready)
                log.append(ready)
        return log + self.close_if_due()

    def close_if_due(self) -> list[GroupReady | StepClosed]:
        """Close the open step if it is full or has resolved its maximum of groups; return the messages to log."""
        draft = self.open
        if draft is None or not self._due(draft):
            return []
        self._close(draft)
        if draft.no_op:
            return []
        return [
            StepClosed(
                namespace=self._ref.namespace,
                job=self._ref.name,
                uid=self._ref.uid,
                agent=self._agent,
                step=draft.step,
                base_version=draft.base_version,
                num_groups=len(draft.assigned),
                indices=tuple(group.index for group in draft.resolved),
            )
        ]

    def recordable(self, committed_step: int) -> StepDraft | None:
        """Return the oldest step if it is finished (committed by the trainer, or a no-op); None otherwise."""
        draft = self.drafts[0] if self.drafts else None
        if draft is None or not draft.closed:
            return None
        return draft if draft.no_op or draft.step <= committed_step else None

    def recorded(self, draft: StepDraft, version: int) -> None:
        """Remove a recorded step. version: the committed version."""
        self.drafts.remove(draft)
        self.version = version

    def num_uncommitted(self) -> int:
        """Return the number of groups assigned to steps that are not recorded yet."""
        return sum(len(draft.assigned) for draft in self.drafts)

    def want(self, in_flight: int) -> int:
        """Return how many new groups to issue (credits, see docs/architecture.md). in_flight: groups that are issued already."""
        draft = self.open
        if draft is None:
            return 0
        room = min(self._missing(draft), self.rules.max_resolved - len(draft.resolved))
        if self.rules.max_staleness == 0:
            ready = in_flight == 0 and len(self.drafts) == 1
            return max(0, room) if ready else 0
        later = (self.rules.steps - draft.step - 1) * self.rules.groups_per_step
        credit = (self.rules.max_staleness + 1) * self.rules.groups_per_step - in_flight - self.num_uncommitted()
        return max(0, min(credit, room + later - in_flight))

    def needed_version(self, in_flight: int) -> int:
        """Return the oldest version from which the next issued group may be sampled without becoming too stale."""
        draft = self.open
        if draft is None:
            return self.version
        ahead = (len(draft.assigned) + in_flight) // self.rules.groups_per_step
        return draft.base_version + ahead - self.rules.max_staleness

    def _home(self, group: CompleteGroup, version: int) -> StepDraft | None:
        home = self._logged_home(group) or self._silent_home(group, version)
        return home or (self.drafts[-1] if self.drafts else None)

    def _logged_home(self, group: CompleteGroup) -> StepDraft | None:
        for draft in self.drafts:
            if group.index in draft.logged or any(ready.group == group.name for ready in draft.assigned):
                return draft
        return None

    def _silent_home(self, group: CompleteGroup, version: int) -> StepDraft | None:
        """Return the silent step to which a group belongs that cannot be trained; None if there is none.

        Groups without signal, or too stale, are not logged. So each silent step gets `max_resolved` of them,
        the number that closed it.
        """
        for draft in self.drafts:
            useless = (
                group.verdict is not GroupOutcome.SIGNAL or draft.base_version - version > self.rules.max_staleness
            )
            if draft.silent and useless and len(draft.resolved) < self.rules.max_resolved:
                return draft
        return None

    @staticmethod
    def _is_new_signal(draft: StepDraft, group: CompleteGroup) -> bool:
        return group.verdict is GroupOutcome.SIGNAL and all(ready.group != group.name for ready in draft.assigned)

    def _missing(self, draft: StepDraft) -> int:
        return self.rules.groups_per_step - len(draft.assigned)

    def _due(self, draft: StepDraft) -> bool:
        full = self._missing(draft) <= 0 and _is_caught_up(draft)
        return full or len(draft.resolved) >= self.rules.max_resolved

    def _close(self, draft: StepDraft) -> None:
        draft.closed = True
        self._open()

    def _open(self) -> None:
        if self._next_step >= self.rules.steps:
            return
        base = self.drafts[-1] if self.drafts else None
        version = self.version if base is None else base.base_version + (0 if base.no_op else 1)
        self.drafts.append(StepDraft(self._next_step, version))
        self._next_step += 1

    def _ready(self, draft: StepDraft, group: CompleteGroup, version: int) -> GroupReady:
        return GroupReady(
            namespace=self._ref.namespace,
            job=self._ref.name,
            uid=self._ref.uid,
            agent=self._agent,
            step=draft.step,
            base_version=draft.base_version,
            position=len(draft.assigned),
            group=group.name,
            index=group.index,
            version=version,
            trajectories=group.trajectories,
        )


def _is_caught_up(draft: StepDraft) -> bool:
    """Return whether every group that the step trains was resolved since this orchestrator started.

    Until then, groups without signal, which are not logged, may still belong between them.
    """
    resolved = {group.name for group in draft.resolved}
    return all(ready.group in resolved for ready in draft.assigned)

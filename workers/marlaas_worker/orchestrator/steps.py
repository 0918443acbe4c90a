"""Assignment of groups to steps. Staleness is decided only here (FlexMARL: barrier-free, strongly consistent).

The version at which a step is trained is known: the committed version plus the closed steps before it. So a
group's staleness is exact when the group is assigned, and a group that would be too stale is dropped only here.
Strict mode (max_staleness 0) resolves groups in index order in rounds, so that a step depends only on seeds.
Otherwise groups are taken as they complete.

Every decision is a message of the GROUPS log, and the steps change only by applying these messages. So applying the
log to the state that the step records give restores the steps.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import (
    GroupLogEntry,
    GroupOutcome,
    GroupReady,
    GroupResolution,
    GroupUnused,
    StepClosed,
    TokenUse,
    UsageAmounts,
)
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.experience import CompleteGroup


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
        resolved: all groups decided in the step, in the order of the decisions.
    """

    step: int
    base_version: int
    assigned: list[GroupReady] = field(default_factory=list)
    resolved: list[GroupResolution] = field(default_factory=list)
    closed: bool = False

    @property
    def no_op(self) -> bool:
        """Whether the step was closed without signal. It counts as a step, but nothing is trained."""
        return self.closed and not self.assigned

    @property
    def dropped(self) -> list[GroupUnused]:
        """The groups with signal that would have been too stale, or were complete only after the last step had closed."""
        unused = (group for group in self.resolved if isinstance(group, GroupUnused))
        return [group for group in unused if group.outcome is GroupOutcome.SIGNAL]

    def usage(self) -> dict[str, UsageAmounts]:
        """Return what the groups resolved in the step used, by agent."""
        found: dict[str, UsageAmounts] = {}
        for group in self.resolved:
            found[group.agent] = found.get(group.agent, UsageAmounts()) + group.usage
        return found

    def faults(self) -> Counter[str]:
        """Return the faults by class of the groups resolved in the step."""
        total = Counter[str]()
        for group in self.resolved:
            total.update(group.faults)
        return total


class Assembly:
    """Steps of one agent that are not recorded yet, oldest first. The last one is open unless training is over.

    Args:
        recorded: number of recorded steps.
        version: version after the recorded steps; -1 while the agent has no version.
    """

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

    def restore(self, log: Iterable[GroupLogEntry]) -> None:
        """Apply the decisions of an earlier orchestrator, in their order. Those of recorded steps change nothing."""
        for message in log:
            if self.drafts and message.step >= self.drafts[0].step:
                self._apply(message)

    def drops(self, group: CompleteGroup, version: int) -> bool:
        """Return whether a group with signal cannot be trained. version: the version that it was sampled from."""
        if group.outcome is not GroupOutcome.SIGNAL or not self.drafts:
            return False
        last = self.drafts[-1]
        return last.closed or last.base_version - version > self.rules.max_staleness

    def resolve(self, group: CompleteGroup, version: int, usage: UsageAmounts | None = None) -> list[GroupLogEntry]:
        """Decide a complete group in the open step; return the messages to log, in order.

        In strict mode the caller passes groups in index order. After the last step is closed, groups are
        counted in that step until it is recorded, and ignored afterwards.

        Args:
            version: the version that the group was sampled from.
            usage: what its episodes used, with open tokens; None: not known.
        """
        if not self.drafts:
            return []
        draft = self.drafts[-1]
        usage = usage or UsageAmounts()
        if group.outcome is not GroupOutcome.SIGNAL:
            message: GroupResolution = self._unused(draft, group, usage.settled(TokenUse.ZERO_VARIANCE))
        elif self.drops(group, version):
            message = self._unused(draft, group, usage.settled(TokenUse.STALE))
        else:
            message = self._ready(draft, group, version, usage.settled(TokenUse.TRAINED))
        self._apply(message)
        return [message, *self.close_if_due()]

    def close_if_due(self) -> list[GroupLogEntry]:
        """Close the open step if it is full or has resolved its maximum of groups; return the messages to log."""
        draft = self.open
        if draft is None or (self._missing(draft) > 0 and len(draft.resolved) < self.rules.max_resolved):
            return []
        closed = StepClosed(
            namespace=self._ref.namespace,
            job=self._ref.name,
            uid=self._ref.uid,
            agent=self._agent,
            step=draft.step,
            base_version=draft.base_version,
            num_groups=len(draft.assigned),
        )
        self._apply(closed)
        return [closed]

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

    def _apply(self, message: GroupLogEntry) -> None:
        """Make a decision effective. Only here do groups enter steps, and steps close."""
        draft = self._draft(message.step)
        if isinstance(message, StepClosed):
            draft.closed = True
            self._open()
            return
        draft.resolved.append(message)
        if isinstance(message, GroupReady):
            draft.assigned.append(message)

    def _draft(self, step: int) -> StepDraft:
        number = step - self.drafts[0].step
        if number >= len(self.drafts):
            raise AssertionError(
                f"{self._ref}: the GROUPS log has a decision of step {step}, and step {self.drafts[-1].step} is not closed"
            )
        return self.drafts[number]

    def _missing(self, draft: StepDraft) -> int:
        return self.rules.groups_per_step - len(draft.assigned)

    def _open(self) -> None:
        if self._next_step >= self.rules.steps:
            return
        base = self.drafts[-1] if self.drafts else None
        version = self.version if base is None else base.base_version + (0 if base.no_op else 1)
        self.drafts.append(StepDraft(self._next_step, version))
        self._next_step += 1

    def _ready(self, draft: StepDraft, group: CompleteGroup, version: int, usage: UsageAmounts) -> GroupReady:
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
            faults=dict(group.faults),
            usage=usage,
        )

    def _unused(self, draft: StepDraft, group: CompleteGroup, usage: UsageAmounts) -> GroupUnused:
        return GroupUnused(
            namespace=self._ref.namespace,
            job=self._ref.name,
            uid=self._ref.uid,
            agent=self._agent,
            step=draft.step,
            index=group.index,
            outcome=group.outcome,
            rewards=group.rewards,
            faults=dict(group.faults),
            usage=usage,
        )

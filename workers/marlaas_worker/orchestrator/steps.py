"""Which group is trained in which step: the one place where staleness is decided (FlexMARL: barrier-free, strongly consistent).

A step is trained at a known version: the committed one plus the closed steps before it. So a group's staleness is exact when it is
assigned, and one that would be too stale is dropped here and nowhere else. Strict mode (max_staleness 0) resolves groups in
index order in rounds, which makes a step a function of seeds alone; otherwise groups are taken as they come.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import GroupReady, StepClosed
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.experience import CompleteGroup, GroupOutcome


@dataclass(frozen=True, slots=True)
class StepRules:
    """P groups a step, S versions of staleness, at most P * (1 + max_refill) groups resolved in a step, `steps` steps in all."""

    groups_per_step: int
    max_staleness: int
    max_refill: int
    steps: int

    @property
    def max_resolved(self) -> int:
        """Groups after which a step closes with what it has."""
        return self.groups_per_step * (1 + self.max_refill)


@dataclass(slots=True)
class StepDraft:
    """A step that is not recorded yet. `resolved` are all groups decided in it; `assigned` those it trains, by position;
    `dropped` those with signal that would have been too stale.

    logged: indices that an earlier orchestrator is on record to have resolved in this step. silent: it closed the step without signal, and so
    without a word in the log.
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
        """Closed without any signal: counted, and the trainer hears nothing of it."""
        return self.closed and not self.assigned

    def faults(self) -> Counter[str]:
        """Faults by class of the groups resolved in the step."""
        return sum((group.faults for group in self.resolved), Counter[str]())


class Assembly:
    """Steps of one agent that are not recorded yet, oldest first; the last one is open unless training is over."""

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
        """The step that is being filled; None once the last one is closed."""
        return self.drafts[-1] if self.drafts and not self.drafts[-1].closed else None

    def begin(self, version: int) -> None:
        """The agent has its first version: steps that were opened before it now have a base."""
        self.version = version
        for draft in self.drafts:
            draft.base_version = max(draft.base_version, version)

    def restore(self, messages: list[GroupReady | StepClosed]) -> None:
        """Take up assignments that an earlier orchestrator logged, in their order."""
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
        """Which of the complete groups to decide now. While there are some whose step is on record, or they fill the open step and not all
        are here, no other is assigned: it would be one too many."""
        waiting = list(groups)
        is_full = self.open is not None and self._missing(self.open) <= 0
        if not is_full and all(self._logged_home(group) is None for group in waiting):
            return waiting
        return [group for group in waiting if group.verdict is not GroupOutcome.SIGNAL or self._logged_home(group)]

    def resolve(self, group: CompleteGroup, version: int) -> list[GroupReady | StepClosed]:
        """Decide a complete group in the open step; return what has to be logged for the trainer, in order.

        In strict mode the caller passes groups in index order. What comes when the last step is closed is counted in it as long as it is not
        on record, and then left out.
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
        """Close the open step once it is full, or has drawn its bound of groups."""
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
        """The oldest step if it is finished: committed by the trainer, or a no-op with nothing before it."""
        draft = self.drafts[0] if self.drafts else None
        if draft is None or not draft.closed:
            return None
        return draft if draft.no_op or draft.step <= committed_step else None

    def recorded(self, draft: StepDraft, version: int) -> None:
        """Forget a step that is on record; `version` is what is committed now."""
        self.drafts.remove(draft)
        self.version = version

    def num_uncommitted(self) -> int:
        """Groups assigned to steps that are not recorded yet."""
        return sum(len(draft.assigned) for draft in self.drafts)

    def want(self, in_flight: int) -> int:
        """How many new groups to give out, `in_flight` being out already (credits: DESIGN, picture, step 1)."""
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
        """The oldest version from which the next group given out may be sampled without becoming too stale."""
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
        """Groups to train nothing with, of which the log says nothing: as many as a step is bound to are those that closed a silent one."""
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
    """Whether every group that the step trains was resolved in this life of the orchestrator too.

    Until then groups without signal, of which the log says nothing, may still have their place between them.
    """
    resolved = {group.name for group in draft.resolved}
    return all(ready.group in resolved for ready in draft.assigned)

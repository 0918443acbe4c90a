"""Assignment of groups to steps. Staleness is decided only here (FlexMARL: barrier-free, strongly consistent).

The version at which a step is trained is known: the committed version plus the closed steps before it. So a
group's staleness is exact when the group is assigned.
Strict mode (max_staleness 0) decides groups in index order in rounds, so that a step depends only on seeds.
Otherwise groups are decided as they complete. No group is dropped for its duration, since training would then prefer short tasks.
Instead, a step does not close while that would make a group in flight too stale, and it keeps places for the groups in flight that
later steps have no room for (earliest deadline first). So steps wait for slow groups, max_staleness versions later. A group is
dropped only if its pin turns out older than known, after an edit of the job for example.

The agents of a job share the steps. A step is a set of groups, and closes for all agents at once: when enough of its groups
train any agent, or at the refill bound. An agent without groups in it has a no-op, which delays no other agent. Each
agent commits after `StepClosed` without waiting for the others, and the step is recorded after the last commit. In strict mode
the tasks of a step of several agents are issued as soon as the step before is closed, pinned to the versions which that step
will make. So each agent's turns wait for its own commit only. The step itself closes after the step before is recorded, so
that no agent is more than one step ahead. Waits point from a step to the step before only, so there is no deadlock.

The groups of a demonstrated step are not sampled: every one has signal, none is stale, and the step is exactly the next groups by
index. Such steps are played ahead of their training, and the first sampled step begins after the last of them is recorded.

Every decision is one message of the job's log (GROUPS) for all agents, and the steps change only by applying these messages and the
step records. So applying the records and then the log restores the steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.messages import (
    AgentClosed,
    Ending,
    GroupDecided,
    GroupOutcome,
    GroupReady,
    GroupResolution,
    GroupUnused,
    StepClosed,
    TokenUse,
    UsageAmounts,
)
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.experience import AgentGroup, CompleteGroup
from marlaas_worker.orchestrator.open_groups import AgentDraft, StepDraft

Decision = GroupDecided | StepClosed
"""A decision: about a group, or that a step closes."""
Sampled = tuple[Mapping[str, int], CompleteGroup]
"""A complete group, and by agent the version that it was sampled from."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """Limits of steps.

    Attributes:
        groups_per_step: number P of trained groups that fill a step.
        max_staleness: largest staleness, in versions, at which a group is trained; 0 is strict mode.
        max_refill: at most P * (1 + max_refill) groups are decided in a step.
        steps: number of steps in all.
        demonstrated: number of steps that train demonstrations; they come first.
        rows_per_step: number of groups in a step that trains demonstrations.
    """

    groups_per_step: int
    max_staleness: int
    max_refill: int
    steps: int
    demonstrated: int = 0
    rows_per_step: int = 0

    @property
    def max_resolved(self) -> int:
        """Number of decided groups after which a sampled step closes, even if it is not full."""
        return self.groups_per_step * (1 + self.max_refill)

    def is_demonstrated(self, step: int) -> bool:
        """Return whether a step trains demonstrations."""
        return step < self.demonstrated


class Assembly:
    """Decides to which step of a job each complete group belongs, whether the step trains it, when the step closes, and how many groups to issue.

    Holds the steps that are not recorded yet. The last one is open unless training is over.

    Attributes:
        drafts: the steps that are not recorded yet, oldest first.
        versions: by agent, the version at which the oldest of `drafts` trains; -1 while the agent has no version.
        oldest: by index of each group in flight, and by agent, a lower bound of the versions of the group's turns; 0 for an agent that is missing.
            The caller adds groups, and updates the bounds.

    Args:
        ref: the job.
        rules: limits of the job's steps.
        versions: by agent, in the order of the manifest, the first version; -1 while the agent has none.
    """

    def __init__(self, ref: JobRef, rules: StepRules, versions: Mapping[str, int]) -> None:
        self._ref = ref
        self.rules = rules
        self.versions = dict(versions)
        self.drafts: list[StepDraft] = []
        self.oldest: dict[int, Mapping[str, int]] = {}
        self._next_step = 0
        self._last_steps = dict.fromkeys(versions, -1)
        self._open()

    @property
    def open(self) -> StepDraft | None:
        """The step that is being filled; None once the last step is closed."""
        return self.drafts[-1] if self.drafts and not self.drafts[-1].closed else None

    @property
    def next_versions(self) -> dict[str, int]:
        """By agent, the version at which the open step is trained; its trainer may not have committed it yet. `versions` if no step is open."""
        draft = self.open
        return (
            dict(self.versions) if draft is None else {name: part.base_version for name, part in draft.agents.items()}
        )

    def begin(self, versions: Mapping[str, int]) -> None:
        """Set the agents' first versions, also as base versions of steps that were opened before these versions existed."""
        self.versions = dict(versions)
        for draft in self.drafts:
            for agent, part in draft.agents.items():
                part.base_version = max(part.base_version, versions[agent])

    @property
    def is_demonstrated(self) -> bool:
        """Whether the open step trains demonstrations."""
        draft = self.open
        return draft is not None and self.rules.is_demonstrated(draft.step)

    @property
    def is_in_order(self) -> bool:
        """Whether groups are decided by index: in strict mode, and in a demonstrated step."""
        return self.rules.max_staleness == 0 or self.is_demonstrated

    @property
    def urgent(self) -> set[int]:
        """Indices of groups in flight that only the open step can train, as far as is known; none if they are decided by index."""
        if self.open is None or self.is_in_order:
            return set()
        return {index for index, versions in self.oldest.items() if self._slack(self.next_versions, versions) <= 0}

    def next_decision(self, ready: Sequence[Sampled]) -> Sampled | None:
        """Return which complete group to decide now, and the versions that it was sampled from.

        None if no group is complete, if groups in flight need the places left in the open step, or if every step is on record.

        Args:
            ready: complete groups, in the order of `in_order`.
        """
        if not self.drafts:
            return None  # every step is on record
        draft = self.open
        if draft is None or self.is_in_order:
            return next(iter(ready), None)
        if (unplaced := next((one for one in ready if not one[1].has_signal), None)) is not None:
            return unplaced
        at = self.next_versions
        first = min(ready, key=lambda one: self._slack(at, one[0]), default=None)
        if first is None or self._slack(at, first[0]) <= 0:
            return first
        others = [self._slack(at, oldest) for index, oldest in self.oldest.items() if index != first[1].index]
        places = self._missing(draft) - 1
        return first if places >= 0 and self._fits(others, places) else None

    def in_order(self, ready: Iterable[Sampled]) -> list[Sampled]:
        """Return groups and the versions that they were sampled from, in the order in which to decide them.

        If `is_in_order`, the lowest index comes first, and otherwise the oldest versions (the smallest sum over the agents).
        """
        by_index = self.is_in_order
        return sorted(ready, key=lambda one: one[1].index if by_index else sum(one[0].values()))

    def decision(
        self, group: CompleteGroup, versions: Mapping[str, int], usage: Mapping[str, UsageAmounts] | None = None
    ) -> GroupDecided:
        """Return the decision about a complete group in the open step, for every agent.

        In strict mode the caller passes groups in index order. After the last step is closed, groups are counted in that step.

        Args:
            versions: by agent, the version that the group was sampled from.
            usage: by agent, its usage in the group's episodes, in which the use of the tokens is open; None: not known.
        """
        draft, used = self.drafts[-1], usage or {}
        parts = [
            self._decision(draft, agent, group, versions.get(agent, 0), used.get(agent, UsageAmounts()))
            for agent in group.agents
        ]
        return GroupDecided(
            **self._names(),
            step=draft.step,
            index=group.index,
            ready=tuple(part for part in parts if isinstance(part, GroupReady)),
            unused=tuple(part for part in parts if isinstance(part, GroupUnused)),
            faults=dict(group.faults),
            plays=group.plays,
        )

    def closing(self) -> StepClosed | None:
        """Return the decision to close the open step; None if it may not close.

        It may close if it is full or has its maximum of decided groups, and no group in flight needs a place in it.
        """
        draft, names = self.open, self._names()
        if draft is None or not self._may_close(draft):
            return None
        parts = [
            AgentClosed(
                **names,
                agent=agent,
                step=draft.step,
                base_version=part.base_version,
                num_groups=len(part.assigned),
                follows=part.follows,
            )
            for agent, part in draft.agents.items()
        ]
        return StepClosed(**names, step=draft.step, parts=tuple(parts))

    def apply(self, decided: Decision) -> None:
        """Add a decided group to its step, or close a step, as the decision says. The step must not be recorded yet."""
        draft = self._draft(decided.step)
        if isinstance(decided, StepClosed):
            draft.closed = True
            self._open()
        else:
            self.oldest.pop(decided.index, None)
            draft.add(decided)

    def is_recorded(self, step: int) -> bool:
        """Return whether a step is recorded."""
        return not self.drafts or step < self.drafts[0].step

    def recordable(self, committed: Mapping[str, int]) -> StepDraft | None:
        """Return the oldest step if every agent has finished it (its trainer has committed it, or it is a no-op); None otherwise.

        Args:
            committed: by agent, the last step that its trainer has committed.
        """
        draft = self.drafts[0] if self.drafts else None
        if draft is None or not draft.closed:
            return None
        finished = all(not part.assigned or draft.step <= committed[agent] for agent, part in draft.agents.items())
        return draft if finished else None

    def recorded(self, step: int, versions: Mapping[str, int], trained: Iterable[str]) -> None:
        """Remove the oldest step, which is recorded now, and take over the agents' versions after it.

        Args:
            step: number of the step.
            versions: by agent, the version after the step: the same as before, if the step trained no token of the agent.
            trained: agents for which the step has groups.
        """
        self.versions = base = dict(versions)
        self._last_steps |= dict.fromkeys(trained, step)
        self._next_step = max(self._next_step, step + 1)
        del self.drafts[:1]
        for one in self.drafts:
            for agent, part in one.agents.items():
                part.base_version = base[agent]
            base = {agent: part.next_version for agent, part in one.agents.items()}
        if not self.drafts:
            self._open()

    def num_uncommitted(self) -> int:
        """Return the number of groups that are assigned for training to the steps in `drafts`, which are not recorded yet."""
        return sum(len(draft.trained) for draft in self.drafts)

    def want(self, in_flight: int, served: Mapping[str, int]) -> int:
        """Return how many new groups to issue (credits, see docs/explanation/architecture.md).

        Args:
            in_flight: number of groups in flight.
            served: by agent, a lower bound of the version from which a new group will be sampled.
        """
        draft = self.open
        if draft is None:
            return 0
        if self.rules.is_demonstrated(draft.step):
            return self._want_demonstrated(draft, in_flight)
        if self.rules.is_demonstrated(self.drafts[0].step):
            return 0
        room = min(self._missing(draft), self.rules.max_resolved - len(draft.decided))
        if self.rules.max_staleness == 0:
            ready = in_flight == 0 and len(self.drafts) <= (2 if len(self.versions) > 1 else 1)
            return max(0, room) if ready else 0
        size = self.rules.groups_per_step
        later = (self.rules.steps - draft.step - 1) * size
        # The open step and the `slack` steps after it can train a new group, all those in flight before it.
        timely = (self._slack(self.next_versions, served) + 1) * size - len(draft.trained) - in_flight
        credit = (self.rules.max_staleness + 1) * size - in_flight - self.num_uncommitted()
        return max(0, min(credit, timely, room + later - in_flight))

    def _want_demonstrated(self, draft: StepDraft, in_flight: int) -> int:
        """Return how many new groups to issue while a demonstrated step, `draft`, is open. in_flight: number of groups in flight."""
        size = self.rules.rows_per_step
        left = (self.rules.demonstrated - draft.step) * size - len(draft.decided) - in_flight
        credit = (1 + max(1, self.rules.max_staleness)) * size - in_flight - self.num_uncommitted()
        return max(0, min(left, credit))

    def needed_versions(self, in_flight: int) -> dict[str, int]:
        """Return, by agent, the oldest version from which the next issued group may be sampled without becoming too stale.

        in_flight: number of groups in flight, which are trained before it.
        """
        draft = self.open
        if draft is None:
            return dict(self.versions)
        ahead = (len(draft.trained) + in_flight) // self.rules.groups_per_step - self.rules.max_staleness
        return {agent: part.base_version + ahead for agent, part in draft.agents.items()}

    def _draft(self, step: int) -> StepDraft:
        number = step - self.drafts[0].step
        if number >= len(self.drafts):
            raise AssertionError(
                f"{self._ref}: the job's log has a decision of step {step}, and step {self.drafts[-1].step} is not closed"
            )
        return self.drafts[number]

    def _missing(self, draft: StepDraft) -> int:
        return self.rules.groups_per_step - len(draft.trained)

    def _may_close(self, draft: StepDraft) -> bool:
        if self.rules.is_demonstrated(draft.step):
            return len(draft.decided) >= self.rules.rows_per_step
        if self.rules.max_staleness == 0 and len(self.drafts) > 1:
            return False
        is_full = self._missing(draft) <= 0
        is_spent = len(draft.decided) >= self.rules.max_resolved
        if self.rules.max_staleness == 0 or not (is_full or is_spent):
            return is_full or is_spent
        after = {agent: part.next_version for agent, part in draft.agents.items()}
        timely = [one for one in self.oldest.values() if self._slack(self.next_versions, one) >= 0]
        slacks = [self._slack(after, versions) for versions in timely]
        if any(slack < 0 for slack in slacks):
            return False  # the next step would be too late for it
        return is_full or self._fits(slacks, self.rules.groups_per_step)

    def _slack(self, at: Mapping[str, int], versions: Mapping[str, int]) -> int:
        """Return for how many more versions a group stays trainable, beyond a step that trains at the versions `at`.

        0: that step can train the group, and the next one cannot. Negative: the group is too stale for that step already.

        at, versions: by agent; the latter are the oldest versions of the group's turns.
        """
        return min(versions.get(agent, 0) + self.rules.max_staleness - version for agent, version in at.items())

    def _fits(self, slacks: Iterable[int], places: int) -> bool:
        """Return whether all groups can be trained before they are too stale (earliest deadline first). Those too stale already do not count.

        Args:
            slacks: of each group, as `_slack` returns it.
            places: number of groups that the step from which the slacks count can still take. Each later step takes `groups_per_step`.
        """
        timely = sorted(slack for slack in slacks if slack >= 0)
        later = self.rules.groups_per_step
        return all(number <= places + slack * later for number, slack in enumerate(timely, 1))

    def _open(self) -> None:
        if self._next_step >= self.rules.steps:
            return
        parts = {agent: AgentDraft(one, self._last_steps[agent]) for agent, one in self.versions.items()}
        if self.drafts:
            number, before = self.drafts[-1].step, self.drafts[-1].agents.items()
            parts = {
                agent: AgentDraft(part.next_version, number if part.assigned else part.follows)
                for agent, part in before
            }
        self.drafts.append(StepDraft(self._next_step, parts))
        self._next_step += 1

    def _decision(
        self, draft: StepDraft, agent: str, group: CompleteGroup, version: int, used: UsageAmounts
    ) -> GroupResolution:
        part, own = draft.agents[agent], group.agents[agent]
        version = part.base_version if self.rules.is_demonstrated(draft.step) else version
        signal = own.outcome is GroupOutcome.SIGNAL
        if signal and not draft.closed and part.base_version - version <= self.rules.max_staleness:
            return self._ready(draft, agent, group, version, used.counted_as(TokenUse.TRAINED))
        use = TokenUse.FROZEN if own.outcome is GroupOutcome.FROZEN else TokenUse.ZERO_VARIANCE
        return self._unused(draft, agent, group, used.counted_as(TokenUse.STALE if signal else use))

    def _ready(
        self, draft: StepDraft, agent: str, group: CompleteGroup, version: int, usage: UsageAmounts
    ) -> GroupReady:
        part, own = draft.agents[agent], group.agents[agent]
        return GroupReady(
            **self._names(),
            agent=agent,
            step=draft.step,
            base_version=part.base_version,
            position=len(part.assigned),
            group=group.name,
            index=group.index,
            version=version,
            trajectories=own.trajectories,
            usage=usage,
            own_rewards=None if own.rewards == tuple(one.reward for one in own.trajectories) else own.rewards,
            other_rewards=dict(own.other_rewards),
            follows=part.follows,
        )

    def _unused(self, draft: StepDraft, agent: str, group: CompleteGroup, usage: UsageAmounts) -> GroupUnused:
        own: AgentGroup = group.agents[agent]
        return GroupUnused(
            **self._names(),
            agent=agent,
            step=draft.step,
            index=group.index,
            outcome=own.outcome,
            rewards=own.rewards,
            usage=usage,
            other_rewards=dict(own.other_rewards),
            is_out_of_turns=all(one.ending is Ending.MAX_TURNS for one in own.trajectories),
        )

    def _names(self) -> dict[str, str]:
        return {"namespace": self._ref.namespace, "job": self._ref.name, "uid": self._ref.uid}

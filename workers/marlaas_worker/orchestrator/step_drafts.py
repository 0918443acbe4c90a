"""Steps that are not recorded yet: the groups decided in them, by agent."""

from collections import Counter
from dataclasses import dataclass, field

from marlaas_api.messages import GroupDecided, GroupOutcome, GroupReady, GroupResolution, GroupUnused, UsageAmounts


@dataclass(slots=True)
class AgentDraft:
    """One agent's part of a step that is not recorded yet.

    Attributes:
        base_version: the agent's version before the step, if each earlier step that is not recorded makes a version of every agent it trains.
        follows: the last step before this one that trains groups of the agent; -1: none.
        assigned: the agent's groups that the step trains, in the order of the decisions.
        resolved: the agent's part of every group decided in the step, trained or not, in the order of the decisions.
    """

    base_version: int
    follows: int = -1
    assigned: list[GroupReady] = field(default_factory=list)
    resolved: list[GroupResolution] = field(default_factory=list)

    @property
    def next_version(self) -> int:
        """The agent's version after the step: `base_version`, plus 1 if the step trains any of the agent's groups as of now."""
        return self.base_version + bool(self.assigned)

    @property
    def dropped(self) -> list[GroupUnused]:
        """The groups with signal that are not trained: they would have been too stale, or were complete only after the last step had closed."""
        unused = (group for group in self.resolved if isinstance(group, GroupUnused))
        return [group for group in unused if group.outcome is GroupOutcome.SIGNAL]


@dataclass(slots=True)
class StepDraft:
    """A step that is not recorded yet.

    Attributes:
        step: number of the step.
        agents: the part of each agent that has a policy, in the order of the manifest.
        decided: the decisions by group index, in their order.
        trained: indices of groups that train at least one agent.
        closed: whether the step is closed: it trains no further groups.
    """

    step: int
    agents: dict[str, AgentDraft]
    decided: dict[int, GroupDecided] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    closed: bool = False

    def add(self, decided: GroupDecided) -> None:
        """Add the decision about a group."""
        self.decided[decided.index] = decided
        for part in decided.parts:
            self.agents[part.agent].resolved.append(part)
        for ready in decided.ready:
            self.agents[ready.agent].assigned.append(ready)
            self.trained.add(decided.index)

    @property
    def resolved(self) -> list[GroupResolution]:
        """The decisions about the groups of the step: one for each agent and group, by agent."""
        return [group for part in self.agents.values() for group in part.resolved]

    def usage(self) -> dict[str, UsageAmounts]:
        """Return the usage of the groups decided in the step, by agent."""
        found: dict[str, UsageAmounts] = {}
        for group in self.resolved:
            found[group.agent] = found.get(group.agent, UsageAmounts()) + group.usage
        return found

    def faults(self) -> Counter[str]:
        """Return the number of faults, by class, of the groups decided in the step."""
        total = Counter[str]()
        for group in self.decided.values():
            total.update(group.faults)
        return total

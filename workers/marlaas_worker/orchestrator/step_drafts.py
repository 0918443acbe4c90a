"""Steps that are not recorded yet: the groups decided in them, by agent."""

from collections import Counter
from dataclasses import dataclass, field

from marlaas_api.messages import GroupDecided, GroupOutcome, GroupReady, GroupResolution, GroupUnused, UsageAmounts


@dataclass(slots=True)
class AgentDraft:
    """One agent's part of a step that is not recorded yet.

    Attributes:
        base_version: version at which the step trains, if every earlier step in which the agent has groups makes a version.
        follows: the agent's last step before this one that has groups; -1: none.
        assigned: groups that the step trains, by position.
        resolved: all groups decided in the step, in the order of the decisions.
    """

    base_version: int
    follows: int = -1
    assigned: list[GroupReady] = field(default_factory=list)
    resolved: list[GroupResolution] = field(default_factory=list)

    @property
    def next_version(self) -> int:
        """The version after the step, as of the groups that it has."""
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
        agents: the part of each agent, in the order of the manifest.
        decided: the decisions by group index, in their order.
        trained: indices of groups that train at least one agent.
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

"""Steps that are not recorded yet: the groups decided in them, by agent."""

from collections import Counter
from dataclasses import dataclass, field

from marlaas_api.messages import GroupOutcome, GroupReady, GroupResolution, GroupUnused, UsageAmounts


@dataclass(slots=True)
class AgentDraft:
    """One agent's part of a step that is not recorded yet.

    Attributes:
        base_version: version at which the step trains, if all earlier steps with groups make one.
        follows: the agent's last step before this one that has groups; -1: none.
        assigned: groups that the step trains, by position.
        resolved: all groups decided in the step, in the order of the decisions.
    """

    base_version: int
    follows: int = -1
    assigned: list[GroupReady] = field(default_factory=list)
    resolved: list[GroupResolution] = field(default_factory=list)
    closed: bool = False

    @property
    def next_version(self) -> int:
        """The version after the step, as of the groups that it has."""
        return self.base_version + bool(self.assigned)

    @property
    def no_op(self) -> bool:
        """Whether the step was closed without signal for the agent. It makes no version of it."""
        return self.closed and not self.assigned

    @property
    def dropped(self) -> list[GroupUnused]:
        """The groups with signal that would have been too stale, or were complete only after the last step had closed."""
        unused = (group for group in self.resolved if isinstance(group, GroupUnused))
        return [group for group in unused if group.outcome is GroupOutcome.SIGNAL]


@dataclass(slots=True)
class StepDraft:
    """A step that is not recorded yet.

    Attributes:
        agents: the part of each agent, in the order of the manifest.
        decided: by group index, the agents for which it is decided.
        trained: indices of groups that train any agent.
    """

    step: int
    agents: dict[str, AgentDraft]
    decided: dict[int, set[str]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)

    @property
    def closed(self) -> bool:
        """Whether the step is closed for every agent."""
        return all(part.closed for part in self.agents.values())

    @property
    def no_op(self) -> bool:
        """Whether the step was closed without signal for any agent. It counts as a step, but nothing is trained."""
        return all(part.no_op for part in self.agents.values())

    @property
    def resolved(self) -> list[GroupResolution]:
        """The decisions for all agents."""
        return [group for part in self.agents.values() for group in part.resolved]

    @property
    def unfinished(self) -> set[int]:
        """Indices of groups that are decided for some agents only."""
        if sum(len(part.resolved) for part in self.agents.values()) == len(self.decided) * len(self.agents):
            return set()
        return {index for index, agents in self.decided.items() if len(agents) < len(self.agents)}

    def usage(self) -> dict[str, UsageAmounts]:
        """Return what the groups resolved in the step used, by agent."""
        found: dict[str, UsageAmounts] = {}
        for group in self.resolved:
            found[group.agent] = found.get(group.agent, UsageAmounts()) + group.usage
        return found

    def faults(self) -> Counter[str]:
        """Return the faults by class of the groups resolved in the step."""
        total, counted = Counter[str](), set[int]()
        for group in self.resolved:
            if group.index not in counted:  # every agent's decision has the group's faults
                total.update(group.faults)
                counted.add(group.index)
        return total

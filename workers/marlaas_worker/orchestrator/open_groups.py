"""Groups of a job from their issue until their step is on record: being played, complete, or decided in a `StepDraft`."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api.messages import (
    Episode,
    GroupDecided,
    GroupOutcome,
    GroupReady,
    GroupResolution,
    GroupUnused,
    UsageAmounts,
)
from marlaas_worker.orchestrator.episodes import EpisodesTooLarge, kept_bytes
from marlaas_worker.orchestrator.experience import CompleteGroup

MAX_KEPT_BYTES = 256 << 20
"""Most memory for the turns and metrics of one job's episodes until their step or evaluation is on record."""


class OpenGroups:
    """Open groups of a job by index, and where in the stream TURNS their turns begin. Turns before the first of these places may be purged.

    A group is decided when it is added to a step, whether the step trains it or not.

    Attributes:
        in_flight: indices of the groups that are issued, and not decided.
        complete: the groups in flight whose members have all ended, by index.
        decided: indices of the groups that are decided, in a step that is not on record.
        evaluation_from: a sequence number of TURNS; the evaluation in progress has no turn before it.
    """

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self.complete: dict[int, CompleteGroup] = {}
        self.decided: set[int] = set()
        self.evaluation_from = 1
        self._turns_from: dict[int, int] = {}
        self._bytes: Counter[int | None] = Counter()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def indices(self) -> set[int]:
        """Indices of all open groups."""
        return self.in_flight | self.decided

    def restore(self, turns_from: Mapping[int, int]) -> None:
        """Replace the groups in flight by the open groups of a ledger (`IssueLedger`), less those that are decided.

        turns_from: by index of each open group of the ledger, a sequence number of TURNS before which the group has no turn.
        """
        self.in_flight = turns_from.keys() - self.decided
        self._turns_from = dict(turns_from)

    def issue(self, indices: Collection[int], first: int) -> None:
        """Add groups that are about to be issued. first: a sequence number of TURNS before which they have no turn."""
        self.in_flight.update(indices)
        self._turns_from |= dict.fromkeys(indices, first)

    def is_played(self, index: int) -> bool:
        """Return whether a group is in flight and not complete."""
        return index in self.in_flight and index not in self.complete

    def count(self, index: int | None, episode: Episode) -> None:
        """Add to the memory in use that of a kept episode. index: of its group; None: it is of the evaluation. Raises EpisodesTooLarge."""
        self._bytes[index] += kept_bytes(episode)
        if (size := self._bytes.total()) > MAX_KEPT_BYTES:
            raise EpisodesTooLarge(
                f"the conversations, candidates and metrics of the episodes in open groups and the evaluation take {size >> 20} MiB, more than "
                f"the {MAX_KEPT_BYTES >> 20} MiB that the orchestrator keeps for a job: lower their number in each episode, evaluation.tasks, "
                "rollout.groupSize or training.groupsPerStep"
            )

    def resolvable(self, *, in_order: bool) -> list[CompleteGroup]:
        """Return the complete groups. in_order: return them by index, and only those before the first group in flight that is not complete."""
        if not in_order:
            return list(self.complete.values())
        ready: list[CompleteGroup] = []
        for index in sorted(self.in_flight):
            if index not in self.complete:
                break
            ready.append(self.complete[index])
        return ready

    def decide(self, index: int) -> None:
        """Move a group from the groups in flight to the decided ones."""
        self.complete.pop(index, None)
        self.in_flight.discard(index)
        self.decided.add(index)

    def recorded(self, indices: Collection[int]) -> None:
        """Remove groups whose step is on record."""
        self.decided.difference_update(indices)
        self.in_flight.difference_update(indices)
        for index in indices:
            del self._bytes[index]
            self._turns_from.pop(index, None)

    def turns_from(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return for each group, in the order of `indices`, a sequence number of TURNS before which it has no turn; 1 if none is known."""
        return tuple(self._turns_from.get(index, 1) for index in indices)

    def evaluated(self) -> None:
        """Stop counting the memory of the evaluation's episodes, once the evaluation is on record."""
        del self._bytes[None]


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

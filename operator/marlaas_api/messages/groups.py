"""The log of a job, written by the orchestrator: the tasks that it has issued, the groups that it has decided, and the steps that it has closed.

An orchestrator restores its open steps from the log, and a trainer trains the groups that the log assigns to its agent.
"""

from enum import StrEnum

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.episodes import Ending, TurnReward
from marlaas_api.messages.plays import GroupPlays
from marlaas_api.messages.usage import UsageAmounts


class GroupOutcome(StrEnum):
    """The use of a complete group for the training of one agent.

    FLAT: every member has the same reward, so there is no advantage. FAULTED: fewer than two members are without a fault, or none if
    rewards are compared with a running mean (`training.baseline`) or a teacher gives the advantages. UNCALLED: in fewer than two of these, or none with a running
    mean, the agent has taken a turn. FROZEN: the agent is not trained.
    """

    SIGNAL = "signal"
    FLAT = "flat"
    FAULTED = "faulted"
    UNCALLED = "uncalled"
    FROZEN = "frozen"


class TrajectoryRef(BusMessage):
    """One member of a group for one policy: its turns (leaves), its reward, and the ending of its episode.

    agent: the agent that took the turns, if it plays another one's policy; empty: the agent of the message. Rewards are
    compared within one agent only.

    untrained: turns that are context only, because they are candidates and train in the group of their choice. choice: number
    of the choice in the episode, if this is one of its candidates; only its last turn is trained, and its reward is
    compared with those of the other candidates only. turn_rewards: of the agent's turns, in their order, where the job credits turns;
    they are part of `reward`.
    """

    member: int
    episode: str
    leaves: tuple[int, ...]
    reward: float
    ending: Ending = Ending.COMPLETED
    agent: str = ""
    untrained: tuple[int, ...] = ()
    choice: int | None = None
    turn_rewards: tuple[TurnReward, ...] = ()


class GroupReady(JobMessage):
    """A complete group, assigned to a step of one agent. The trainer uses neither usage nor rewards of the group."""

    agent: str
    step: int
    base_version: int
    """The step trains the group at this version, so that its staleness is already exact; it is lower if an earlier step turns out to
    train no token.
    """
    position: int
    """Consecutive, from 0 among the agent's groups of the step; a trainer accumulates in exactly this order."""
    group: str
    index: int
    version: int
    trajectories: tuple[TrajectoryRef, ...]
    """At least two, or at least one with a running mean (`training.baseline`) or a teacher."""
    usage: UsageAmounts = UsageAmounts()
    """What the agents that play the policy used in their episodes."""
    own_rewards: tuple[float, ...] | None = None
    """Of the agent itself; None: those of the trajectories."""
    other_rewards: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Of further players of the policy, by agent."""
    follows: int | None = None
    """The agent's last step before this one that has groups (-1: none); None in messages of earlier releases."""

    @property
    def staleness(self) -> int:
        """Version at which the step trains minus the version that the group was sampled from."""
        return self.base_version - self.version

    @property
    def outcome(self) -> GroupOutcome:
        """SIGNAL, since the group is trained."""
        return GroupOutcome.SIGNAL

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the agent itself, as in `GroupUnused`."""
        return tuple(one.reward for one in self.trajectories) if self.own_rewards is None else self.own_rewards


class GroupUnused(JobMessage):
    """A complete group that is counted in a step of one agent and not trained. The trainer ignores it.

    outcome: SIGNAL if the group was dropped: it would have been too stale, or all steps were closed. rewards: of the
    agent itself in the members without a fault, whether it has taken a turn or not; empty if the task may not call it. usage: what the agents that play the policy used in their episodes. other_rewards: as
    `rewards`, of further players of the policy, by agent. is_out_of_turns: every member without a fault used up its turns.
    """

    agent: str
    step: int
    index: int
    outcome: GroupOutcome = GroupOutcome.FLAT
    rewards: tuple[float, ...] = ()
    usage: UsageAmounts = UsageAmounts()
    other_rewards: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    is_out_of_turns: bool = False


class AgentClosed(JobMessage):
    """The end of a step for one agent. The optimizer step is due after positions 0..num_groups-1 have arrived.

    num_groups: 0 if the step closed without signal for the agent. Such a step makes no version of it, and the trainer ignores
    it. follows: as in `GroupReady`.
    """

    agent: str
    step: int
    base_version: int
    num_groups: int
    follows: int | None = None


GroupResolution = GroupReady | GroupUnused
"""The decision about one complete group for one agent."""


class GroupDecided(JobMessage):
    """The decision about one complete group for all agents of its job; stream GROUPS. faults: by class."""

    step: int
    index: int
    ready: tuple[GroupReady, ...] = ()
    unused: tuple[GroupUnused, ...] = ()
    faults: dict[str, int] = Field(default_factory=dict)
    plays: GroupPlays = GroupPlays()

    @property
    def parts(self) -> tuple[GroupResolution, ...]:
        """The decisions for the agents."""
        return (*self.ready, *self.unused)


class StepClosed(JobMessage):
    """The end of a step for all agents of a job; stream GROUPS."""

    step: int
    parts: tuple[AgentClosed, ...]


class DataPosition(JobMessage):
    """Where a job is in its training data, and what its next groups are issued with."""

    next_index: int = 0
    """Lowest index never issued."""
    skipped_in_pass: int = 0
    """Indices below `next_index` that were never issued because their tasks were skipped, in the current pass."""
    skipped_solved: int = 0
    """Those whose tasks were solved, in all passes."""
    skipped_hopeless: int = 0
    """Those whose tasks were hopeless, in all passes."""
    past_step: int = -1
    """Step during which `past_versions` are drawn."""
    past_versions: dict[str, int] = Field(default_factory=dict)
    """By agent that plays past versions, the one that it plays in groups issued while step `past_step` is open."""
    episode_bytes: int = 0
    """Bytes that an episode adds to TURNS; 0: not measured."""


class TasksIssued(DataPosition):
    """Training tasks that are issued next, and the position after them; stream GROUPS. Written before the tasks are published.

    indices: of their groups. turns_from: a sequence of TURNS below which these have no turn, read before they were issued.
    """

    indices: tuple[int, ...]
    turns_from: int = 1


class EvaluationBegun(JobMessage):
    """An evaluation that begins next; stream GROUPS. Written before its tasks are published.

    version: that is evaluated (`StepRecord.version`). step: number of finished steps after which it was the newest. versions: of
    the agents in it. turns_from: as in `TasksIssued`.
    """

    version: int
    step: int
    versions: dict[str, int]
    turns_from: int = 1


class IssueLedger(DataPosition):
    """All that the job has issued and not recorded; stream GROUPS.

    It replaces all `TasksIssued` and `EvaluationBegun` before it. Written once a step or an evaluation is recorded.
    """

    open: tuple[int, ...] = ()
    """Indices of groups that were issued and do not yet belong to a recorded step."""
    open_from: tuple[int, ...] = ()
    """Their `turns_from`, in the same order; missing values are 1: nothing is known."""
    evaluating: int | None = None
    """Version under evaluation, as in `EvaluationBegun`."""
    evaluating_step: int = 0
    evaluating_versions: dict[str, int] = Field(default_factory=dict)
    evaluating_from: int = 1


IssueEntry = TasksIssued | EvaluationBegun | IssueLedger
"""An entry about issued tasks or an evaluation."""
JobLogEntry = GroupDecided | StepClosed | IssueEntry
"""An entry of a job's log, a message of the stream GROUPS."""

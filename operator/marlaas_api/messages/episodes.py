"""The record of a finished episode, as reported by the sandbox."""

from enum import StrEnum

from pydantic import Field

from marlaas_api.messages.base import BusMessage, Integer, JobMessage
from marlaas_api.names import Split


class FaultClass(StrEnum):
    """Faults that the policy did not cause; such an attempt is never scored.

    UNSCORED: the environment gave no reward. It is not played again: the environment decided so.
    WAITED: the attempt was given up because a turn waited too long for a place in an engine, or the store of a data set does not
    answer. It is always repeated, so this class occurs in `prior_faults` only.
    """

    INFRA = "infra"
    ENV = "env"
    UNSCORED = "unscored"
    WAITED = "waited"


class Ending(StrEnum):
    """Ending of an episode without a fault; every ending is scored."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TOOL_ERROR = "tool_error"


class Choice(BusMessage):
    """Several replies of an agent from one state (`Agent.branch`): a group of their own.

    turns: the turn of each candidate. rewards: one for each; empty if the episode ended before they were known. parent: the
    turn that all follow; None if they begin a conversation.
    """

    agent: str
    turns: tuple[Integer, ...]
    rewards: tuple[float, ...] = ()
    parent: Integer | None = None


class TurnReward(BusMessage):
    """The reward of one turn (`Agent.reward_turn`)."""

    turn: Integer
    reward: float


class Episode(JobMessage):
    """A finished episode; stream EPISODES. It has either a `fault`, and does not count, or `rewards` by agent."""

    group: str
    split: Split
    index: Integer
    member: Integer
    episode: str
    fault: FaultClass | None = None
    fault_text: str = ""
    is_permanent: bool = False
    """Every play of the job would have this fault, so it is not repeated."""
    prior_faults: tuple[FaultClass, ...] = ()
    """Faults of earlier attempts at this member."""
    ending: Ending = Ending.COMPLETED
    tool_error: str = ""
    """Text of the failed tool that ended the episode."""
    load_notes: tuple[str, ...] = ()
    """Sentences about files, threads and processes that loading the environment has left; of the first episode after each load."""
    rewards: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    leaves: dict[str, tuple[Integer, ...]] = Field(default_factory=dict)
    """By agent, the last turn of each of its conversations."""
    may_speak: tuple[str, ...] = ()
    """Agents that the task may call (`agents_of` of the environment); empty: all."""
    choices: tuple[Choice, ...] = ()
    turn_rewards: dict[str, tuple[TurnReward, ...]] = Field(default_factory=dict)
    """By agent, of its turns but candidates, in their order, where the job credits turns (`training.credit`); they are part of
    `rewards`.
    """
    prompt: str = ""
    """Digest of the first prompt and of the content that the task has drawn; empty: not known."""
    data_digest: str = ""
    """SHA-256 of the data sets that its sandbox has loaded (`marlaas.envs.data_digest`); empty: none."""
    answer: str = ""
    """Digest of the answer that the environment has read from the replies (`Score.answer`); empty: none."""
    num_turns: Integer = 0
    num_tokens: Integer = 0
    """Generated ones."""
    num_cut: Integer = 0
    """Turns that maxTokens, the context or the time limit cut."""
    num_overtime: Integer = 0
    """Those of the time limit."""
    duration_s: float = 0.0
    tool_s: float = 0.0

    def may_call(self, agent: str) -> bool:
        """Return whether the task may call an agent."""
        return not self.may_speak or agent in self.may_speak

"""A finished play, as the sandbox tells of it."""

from enum import StrEnum

from pydantic import Field

from marlaas_api.messages.base import JobMessage
from marlaas_api.names import Split


class FaultClass(StrEnum):
    """Faults that the policy did not cause, and that are therefore never scored.

    WAITED: a play was given up because a turn waited too long for its place. It is always played again, so it occurs in `prior_faults` only.
    """

    INFRA = "infra"
    ENV = "env"
    WAITED = "waited"


class Ending(StrEnum):
    """How the policy's side of an episode ended; every one of these is scored."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TOOL_ERROR = "tool_error"


class Episode(JobMessage):
    """A finished play; EPISODES. Either `fault` says why it does not count, or `rewards` (per agent) say what it was worth.

    leaves: per agent, the last turn of each of its conversations. prior_faults: what earlier attempts at this member died of.
    """

    group: str
    split: Split
    index: int
    member: int
    episode: str
    fault: FaultClass | None = None
    fault_text: str = ""
    prior_faults: tuple[FaultClass, ...] = ()
    ending: Ending = Ending.COMPLETED
    rewards: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    leaves: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    num_turns: int = 0
    duration_s: float = 0.0
    tool_s: float = 0.0

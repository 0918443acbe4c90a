"""Messages that a child sends to its supervisor. A child runs foreign code, so `session` validates each of them."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from marlaas.scores import MAX_DATA, MAX_METRIC_NAME, MAX_METRICS, MAX_NUMBER
from marlaas_api.messages import ChatMessage
from marlaas_api.messages.turns import StopText
from marlaas_api.names import BRANCH_TURNS, MAX_BRANCHES, MAX_STOPS, is_measured
from marlaas_api.numeric import LARGEST_INTEGER


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"the name {name!r} has characters that cannot be printed")
    return name


_Number = Annotated[FiniteFloat, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Rewards = dict[str, _Number]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME), AfterValidator(_printable)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TurnMessage(_Message):
    """Request for a turn of an agent.

    Attributes:
        agent: name of the agent.
        number: number of the turn among the agent's own turns (`names.turn_number`).
        num_before: turns that the agent had before this one; those in branches that run at the same time do not count.
        parent: number of the agent's turn that this one follows; None begins a conversation.
        append: messages after the parent's reply, or raw text.
        max_tokens: limit of the reply; None: the job's.
        tools: JSON text of each function that the chat template shows; None: those of the parent.
        choice: number of the choice of which the reply is one candidate (one of several replies from one state); None: of no choice.
        stop: strings that end the reply.
        demonstration: the reply itself, if the task is demonstrated; None: the agent's policy samples the reply.
    """

    kind: Literal["turn"]
    agent: str
    number: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    num_before: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    parent: Annotated[int, Field(ge=0)] | None
    append: Annotated[str, Field(min_length=1)] | Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None
    tools: list[str] | None = None
    choice: Annotated[int, Field(ge=0, lt=MAX_BRANCHES)] | None = None
    stop: Annotated[list[StopText], Field(max_length=MAX_STOPS)] = []
    demonstration: ChatMessage | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the turn is of a held-out demonstration, which is measured and not trained."""
        return self.demonstration is not None and is_measured(self.number, 1)


class AgentsMessage(_Message):
    """Names of the agents that the task may call; sent before the first turn. Without this message, the task may call all agents."""

    kind: Literal["agents"]
    agents: list[str]


class ToolMessage(_Message):
    """Start or end of a tool call.

    is_open: True at the start, False at the end. rewards: each agent's reward so far, by name.
    """

    kind: Literal["tool"]
    is_open: bool
    rewards: _Rewards


class ChoiceMessage(_Message):
    """Rewards of one choice. Its candidates are several replies of an agent from one state.

    number: of the choice. rewards: one for each candidate, in the order of the candidates' turns.
    """

    number: Annotated[int, Field(ge=0, lt=MAX_BRANCHES)]
    rewards: list[_Number]


class TurnRewardMessage(_Message):
    """Reward of one turn. agent: its agent's name. turn: its number among that agent's turns."""

    agent: str
    turn: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    reward: _Number


class ScoreMessage(_Message):
    """Result of an episode that the environment has scored.

    Attributes:
        rewards: reward of each agent, by name.
        metrics: the environment's metrics, by name.
        ending: how the episode ended, as the environment sees it; `TurnLedger.ending` corrects it.
        tool_s: seconds in tool calls.
        tool_error: text of the ToolError that ended the episode; empty: none.
        content: digest of the contents that the task has drawn (`Task.drawn`); empty if it has drawn none.
        answer: digest of the policy's answer; empty: none.
        choices: rewards of the candidates of each choice.
        turn_rewards: rewards of single turns.
        compared_by: JSON text of `Score.data`, if the environment compares the episodes of a group; else None.
    """

    kind: Literal["score"]
    rewards: _Rewards
    metrics: Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS + 1)]  # with `REPLACED`
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: Annotated[FiniteFloat, Field(ge=0)]
    tool_error: str = ""
    content: Annotated[str, Field(max_length=64)] = ""
    answer: Annotated[str, Field(max_length=64)] = ""
    choices: Annotated[list[ChoiceMessage], Field(max_length=MAX_BRANCHES)] = []
    turn_rewards: list[TurnRewardMessage] = []
    compared_by: Annotated[str, Field(max_length=MAX_DATA)] | None = None


class UnscoredMessage(_Message):
    """End of an episode to which the environment gave no reward."""

    kind: Literal["unscored"]


class ComparedMessage(_Message):
    """Result of the comparison of a group's episodes.

    scores: for each episode, in the order of the request, its rewards by agent and its metrics by name.
    """

    kind: Literal["compared"]
    scores: list[tuple[_Rewards, Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS + 1)]]]


class FaultMessage(_Message):
    """Report of an exception that ended the episode or the comparison.

    Attributes:
        text: the error, for people.
        is_permanent: playing again cannot help.
        is_infra: a service that the environment calls has failed.
    """

    kind: Literal["fault"]
    text: str
    is_permanent: bool = False
    is_infra: bool = False


ChildMessage = (
    AgentsMessage | TurnMessage | ToolMessage | ScoreMessage | UnscoredMessage | ComparedMessage | FaultMessage
)
CHILD_MESSAGES: TypeAdapter[ChildMessage] = TypeAdapter(Annotated[ChildMessage, Field(discriminator="kind")])

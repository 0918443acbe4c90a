"""Messages of a child, validated: a child runs foreign code, so its messages are untrusted until `parse`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from marlaas.envs.playing import MAX_METRIC_NAME, MAX_METRICS, MAX_NUMBER
from marlaas_api.messages import ChatMessage
from marlaas_api.numeric import LARGEST_INTEGER


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!r} is no name that can be shown")
    return name


_Number = Annotated[FiniteFloat, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Rewards = dict[str, _Number]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME), AfterValidator(_printable)]


class BadChildMessage(Exception):
    """A child sent a malformed message, or one that is not valid in this state."""


class _ChildMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TurnMessage(_ChildMessage):
    """Request for a turn."""

    kind: Literal["turn"]
    agent: str
    parent: Annotated[int, Field(ge=0)] | None
    append: Annotated[str, Field(min_length=1)] | Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None
    tools: list[str] | None = None


class ToolMessage(_ChildMessage):
    """Start or end of a tool call. rewards: rewards of the agents so far."""

    kind: Literal["tool"]
    is_open: bool
    rewards: _Rewards


class ScoreMessage(_ChildMessage):
    """Result of a completed episode."""

    kind: Literal["score"]
    rewards: _Rewards
    metrics: Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS)]
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: Annotated[FiniteFloat, Field(ge=0)]


class FaultMessage(_ChildMessage):
    """Exception of the environment."""

    kind: Literal["fault"]
    text: str


Saying = TurnMessage | ToolMessage | ScoreMessage | FaultMessage
_ADAPTER: TypeAdapter[Saying] = TypeAdapter(Annotated[Saying, Field(discriminator="kind")])


def parse(body: bytes, agents: tuple[str, ...]) -> Saying:
    """Validate one message of a child. agents: the job's agents. Raises BadChildMessage."""
    try:
        saying = _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadChildMessage(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
    if isinstance(saying, TurnMessage) and saying.agent not in agents:
        raise BadChildMessage(f"a turn of {saying.agent!r}, but the job's agents are {', '.join(agents)}")
    if isinstance(saying, ToolMessage | ScoreMessage) and set(saying.rewards) != set(agents):
        raise BadChildMessage(f"rewards for {', '.join(saying.rewards) or 'nobody'}; expected {', '.join(agents)}")
    return saying

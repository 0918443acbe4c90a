"""What a child may say, checked: everything it sends is foreign until it has been through `parse`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from marlaas.envs.playing import MAX_METRIC_NAME, MAX_METRICS, MAX_NUMBER
from marlaas_api.kinds.base import LARGEST_INTEGER
from marlaas_api.messages import ChatMessage


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!r} is no name that can be shown")
    return name


_Number = Annotated[FiniteFloat, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Rewards = dict[str, _Number]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME), AfterValidator(_printable)]


class BadSaying(Exception):
    """A child said something that is no message, or not one that makes sense here."""


class _Saying(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TurnSaying(_Saying):
    """It asks for a turn."""

    kind: Literal["turn"]
    agent: str
    parent: Annotated[int, Field(ge=0)] | None
    append: Annotated[str, Field(min_length=1)] | Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None
    tools: list[str] | None = None


class ToolSaying(_Saying):
    """It begins or ends a tool call; `rewards` is what the agents have earned so far."""

    kind: Literal["tool"]
    is_open: bool
    rewards: _Rewards


class ScoreSaying(_Saying):
    """It has played to the end."""

    kind: Literal["score"]
    rewards: _Rewards
    metrics: Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS)]
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: Annotated[FiniteFloat, Field(ge=0)]


class FaultSaying(_Saying):
    """The environment raised."""

    kind: Literal["fault"]
    text: str


Saying = TurnSaying | ToolSaying | ScoreSaying | FaultSaying
_ADAPTER: TypeAdapter[Saying] = TypeAdapter(Annotated[Saying, Field(discriminator="kind")])


def parse(body: bytes, agents: tuple[str, ...]) -> Saying:
    """Check one message of a child of a job with these agents. Raises BadSaying."""
    try:
        saying = _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadSaying(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
    if isinstance(saying, TurnSaying) and saying.agent not in agents:
        raise BadSaying(f"a turn of {saying.agent!r}, but the job's agents are {', '.join(agents)}")
    if isinstance(saying, ToolSaying | ScoreSaying) and set(saying.rewards) != set(agents):
        raise BadSaying(f"rewards for {', '.join(saying.rewards) or 'nobody'}; expected {', '.join(agents)}")
    return saying

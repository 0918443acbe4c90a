"""One turn: what a sandbox asks for, what it hears, and what the rollout role records."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.names import StopReason


class ToolCallMessage(BusMessage):
    """A call that an assistant's message makes; arguments: the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(BusMessage):
    """One chat message; `name` is a tool's. Only an assistant's message that was written, not generated, has `tool_calls`: what was
    generated is text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCallMessage, ...] = ()
    tool_call_id: str | None = None


class GenerateRequest(JobMessage):
    """Append to a conversation and generate; core subject `gen.<ns>.<job>.<agent>`.

    The id is `names.request_id(episode, turn)`. `parent` None begins a conversation; otherwise it names the turn whose
    conversation goes on (turns may branch). `append` is chat messages, or raw text that bypasses the template. `max_tokens` None: the job's own bound,
    which it can only lower. `tools`: the JSON text of each function that the chat template is shown; None: as in the parent, a new conversation has none.
    `deadline_s`: a replica forgets the request this many seconds after it last heard of it; asking again and KeepRequest begin them anew.
    `reply_to` is set when a replica forwards to the owner.
    """

    agent: str
    group: str
    member: int
    episode: str
    turn: int
    parent: int | None
    append: tuple[ChatMessage, ...] | str
    tools: tuple[str, ...] | None = None
    max_tokens: int | None = None
    deadline_s: float = Field(allow_inf_nan=False)
    reply_to: str | None = None


class KeepRequest(JobMessage):
    """The sandbox still waits for an episode's turns; same subject as the request."""

    agent: str
    episode: str


class CancelRequest(JobMessage):
    """The sandbox no longer wants an episode's turns; same subject as the request."""

    agent: str
    episode: str


class ReplyPhase(StrEnum):
    """A request is accepted, beats while it waits or runs, and ends in a result or a failure."""

    ACCEPTED = "accepted"
    HEARTBEAT = "heartbeat"
    RESULT = "result"
    FAILED = "failed"


class GenerateReply(BusMessage):
    """What a sandbox hears of its request, on the reply inbox. It never sees ids, logprobs or versions.

    A HEARTBEAT has `running_s`, the seconds for which the engine has generated; None: the request waits. `doing` is for people.
    A FAILED has `error`, for people; `retryable`: the same request may be sent again; `waits`: nothing failed, the replica only has no place
    for it now, so the time until one has is waiting.
    """

    request: str
    phase: ReplyPhase
    replica: str
    text: str = ""
    stop_reason: StopReason | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    running_s: float | None = None
    doing: str = ""
    error: str = ""
    retryable: bool = False
    waits: bool = False


class Meter(BusMessage):
    """What a turn cost: tokens prefilled (of them `cached_tokens` from the prefix cache) and generated; seconds in queue and engine."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int
    queue_s: float = 0.0
    engine_s: float = 0.0


class Turn(JobMessage):
    """One generation as the engine's side saw it; `turn.<ns>.<job>.<episode>.<n>`, first writer wins.

    prompt_ids, output_ids: int32 bytes [T] (`marlaas_api.arrays`); logprobs: float32 bytes, one per output id, under the
    sampling policy at `temperature`. `prompt_ids` are only what this turn appended after its parent's output; with `opens_segment`
    they are a whole prompt (the first turn, or a template that rewrote its past). `text` is the reply's text; `append` and `tools` are what was
    asked for; of a long prompt that was not fed, because no context window holds it, the beginning and a digest.
    """

    agent: str
    group: str
    member: int
    episode: str
    turn: int
    parent: int | None
    version: int
    adapter_sha256: str
    opens_segment: bool
    append: tuple[ChatMessage, ...] | str
    tools: tuple[str, ...] | None = None
    prompt_ids: bytes
    output_ids: bytes
    logprobs: bytes
    text: str
    stop_reason: StopReason
    temperature: float
    meter: Meter
    replica: str
    at: float

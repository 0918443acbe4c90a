"""Messages of one turn: the sandbox's request, the replies to it, and the rollout role's record."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from marlaas_api.messages.base import BusMessage, Integer, JobMessage
from marlaas_api.names import MAX_STOP_TEXT, MAX_STOPS, StopReason

StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_TEXT)]


class ToolCallMessage(BusMessage):
    """A tool call in an assistant's message. arguments: the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(BusMessage):
    """One chat message. name: of a tool. tool_calls, reasoning_content: of an assistant."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCallMessage, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str = ""


class ReplyPartsMessage(BusMessage):
    """A reply as its model family reads it. content: without reasoning and calls. raw: with every special token written out, without the end token."""

    reasoning: str = ""
    content: str
    tool_calls: tuple[ToolCallMessage, ...] = ()
    raw: str


class GenerateRequest(JobMessage):
    """A request to append to a conversation and generate; core subject `gen.<ns>.<job>.<agent>`.

    The request's id is `names.request_id(episode, turn)`. parent: None begins a conversation; otherwise the turn whose
    conversation continues (turns may branch). append: chat messages, or raw text that bypasses the template.
    demonstration: the assistant's message that is recorded as the reply, of a group that is demonstrated; the engine does not run.
    max_tokens: None is the job's own limit, which a request can only lower. stop: strings that end the reply, beside the job's. tools: the JSON text of each function for
    the chat template; None: those of the parent, or none in a new conversation.

    deadline_s: the replica drops the request this many seconds after the last message about it; a repeated request or a
    KeepRequest restarts this time. reply_to: set when a replica forwards the request to the group's owner. last_replica:
    replica that replied last to a request of the group, as far as the sandbox knows; a hint for the choice of the owner.
    """

    agent: str
    group: str
    member: Integer
    episode: str
    turn: Integer
    parent: Integer | None
    append: tuple[ChatMessage, ...] | str
    tools: tuple[str, ...] | None = None
    demonstration: ChatMessage | None = None
    max_tokens: Integer | None = None
    stop: Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)] = ()
    deadline_s: float = Field(allow_inf_nan=False)
    reply_to: str | None = None
    last_replica: str = ""


class KeepRequest(JobMessage):
    """Notice that the sandbox still waits for an episode's turns; same subject as the request."""

    agent: str
    episode: str


class CancelRequest(JobMessage):
    """Notice that the sandbox no longer needs an episode's turns; same subject as the request."""

    agent: str
    episode: str


class ReplyPhase(StrEnum):
    """Phase of a request: accepted, heartbeats while it waits or runs, and finally a result or a failure."""

    ACCEPTED = "accepted"
    HEARTBEAT = "heartbeat"
    RESULT = "result"
    FAILED = "failed"


class GenerateReply(BusMessage):
    """A reply to a sandbox's request, on the reply inbox. It never contains ids, logprobs or versions.

    RESULT: `text` and `opening` as in `Turn`. HEARTBEAT: `running_s` is the number of seconds for which the engine has generated; None: the request waits. `doing`
    is for people.

    FAILED: `error` is for people. retryable: the same request may be sent again. waits: not an error; the replica has
    no place now, and the time until it has one counts as waiting. stops_engine: the request is the cause of the
    engine's failures, so another attempt at the episode would fail too. is_refused: the environment's messages or the base model's chat template are the
    cause, so another attempt would be refused too; is_permanent: so would every other episode of the job. context_tokens, is_overtime:
    see `Turn`.
    """

    request: str
    phase: ReplyPhase
    replica: str
    text: str = ""
    parts: ReplyPartsMessage | None = None
    opening: str = ""
    stop_reason: StopReason | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    context_tokens: int = 0
    is_overtime: bool = False
    running_s: float | None = None
    doing: str = ""
    error: str = ""
    retryable: bool = False
    waits: bool = False
    stops_engine: bool = False
    is_refused: bool = False
    is_permanent: bool = False


class Meter(BusMessage):
    """Cost of a turn: tokens prefilled (`cached_tokens` of them from the prefix cache) and generated; seconds in queue and engine.

    share_s: its share of the engine's time, of which each of n requests in the engine has 1/n.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int
    queue_s: float = 0.0
    engine_s: float = 0.0
    share_s: float = 0.0


class Turn(JobMessage):
    """One generation, recorded by the rollout role; `turn.<ns>.<job>.<episode>.<n>`, the first writer wins.

    prompt_ids, output_ids: int32 bytes [T] (`marlaas_api.wire`). logprobs: float32 bytes, one per output id, under
    the sampling policy at `temperature`. `prompt_ids` are only the tokens that this turn appended after its parent's
    output; with `opens_segment` they are a whole prompt (the first turn, or after a template that rewrote earlier
    text). text: the reply's text. parts: None if text, content and raw are equal. opening: the beginning of the assistant's message
    that stands in the prompt, from the chat template (`<think>`) or the request. append, tools: from the request. A prompt too long for the context window is not fed
    to the engine; of such a prompt, only the beginning and a digest are recorded, with its length, `unfit_tokens`, and that of the
    window, `context_tokens`; otherwise both are 0. num_preemptions: of the job before the
    request. is_overtime: whether the turn's time limit ended it, with the stop reason LENGTH.
    demonstration: from the request; such a turn was not sampled, so it has no version, adapter, logprobs and cost.
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
    parts: ReplyPartsMessage | None = None
    opening: str = ""
    stop_reason: StopReason
    temperature: float
    meter: Meter
    num_preemptions: int = 0
    unfit_tokens: int = 0
    context_tokens: int = 0
    is_overtime: bool = False
    demonstration: ChatMessage | None = None
    replica: str
    at: float

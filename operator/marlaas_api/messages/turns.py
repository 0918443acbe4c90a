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
    """A reply, parsed by the format of its model family. content: without reasoning and calls. raw: with every special token written out, without the end token."""

    reasoning: str = ""
    content: str
    tool_calls: tuple[ToolCallMessage, ...] = ()
    raw: str


class GenerateRequest(JobMessage):
    """A request to append to a conversation and generate; core subject `gen.<ns>.<job>.<agent>`. Its id is `names.request_id(episode, turn)`."""

    agent: str
    group: str
    member: Integer
    episode: str
    turn: Integer
    parent: Integer | None
    """None begins a conversation; otherwise the turn whose conversation continues (turns may branch)."""
    append: tuple[ChatMessage, ...] | str
    """Chat messages, or raw text that bypasses the template."""
    tools: tuple[str, ...] | None = None
    """JSON text of each function for the chat template; None: those of the parent, or none in a new conversation."""
    demonstration: ChatMessage | None = None
    """The assistant's message that is recorded as the reply, of a group that is demonstrated; the engine does not run."""
    max_tokens: Integer | None = None
    """None is the job's own limit, which a request can only lower."""
    stop: Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)] = ()
    """Strings that end the reply, beside the job's."""
    scores: Integer | None = None
    """The last turn of another agent's conversation whose generated tokens this agent scores, as the teacher of `distill`; it generates
    nothing. The request's turn is `names.SCORES` plus that number.
    """
    deadline_s: float = Field(allow_inf_nan=False)
    """The replica drops the request this many seconds after the last message about it; a repeated request or a KeepRequest restarts
    this time.
    """
    reply_to: str | None = None
    """Set when a replica forwards the request to the group's owner."""
    last_replica: str = ""
    """Replica that replied last to a request of the group, as far as the sandbox knows; a hint for the choice of the owner."""


class KeepRequest(JobMessage):
    """Notice that the sandbox still waits for an agent's turns in an episode; same subject as the request."""

    agent: str
    episode: str


class CancelRequest(JobMessage):
    """Notice that the sandbox no longer needs an agent's turns in an episode; same subject as the request."""

    agent: str
    episode: str


class ReplyPhase(StrEnum):
    """Phase of a request: accepted, heartbeats while it waits or runs, and finally a result or a failure."""

    ACCEPTED = "accepted"
    HEARTBEAT = "heartbeat"
    RESULT = "result"
    FAILED = "failed"


class GenerateReply(BusMessage):
    """A reply to a sandbox's request, on the reply inbox. It never contains ids, logprobs or versions."""

    request: str
    phase: ReplyPhase
    replica: str
    text: str = ""
    """Of a RESULT, as in `Turn`."""
    parts: ReplyPartsMessage | None = None
    opening: str = ""
    """Of a RESULT, as in `Turn`."""
    stop_reason: StopReason | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    context_tokens: int = 0
    """As in `Turn`."""
    is_overtime: bool = False
    """As in `Turn`."""
    running_s: float | None = None
    """Of a HEARTBEAT: seconds for which the engine has generated; None: the request waits."""
    doing: str = ""
    """Of a HEARTBEAT, for people."""
    error: str = ""
    """Of a FAILED reply, for people."""
    retryable: bool = False
    """The same request may be sent again."""
    waits: bool = False
    """Not an error: the replica has no place now, and the time until it has one counts as waiting."""
    stops_engine: bool = False
    """The request is the cause of the engine's failures, so another attempt at the episode would fail too."""
    is_refused: bool = False
    """The environment's messages or the base model's chat template are the cause, so another attempt would be refused too."""
    is_permanent: bool = False
    """Every other episode of the job would be refused too."""


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
    """One generation, recorded by the rollout role; `turn.<ns>.<job>.<episode>.<n>`, the first writer wins."""

    agent: str
    group: str
    member: int
    episode: str
    turn: int
    parent: int | None
    version: int
    adapter_sha256: str
    opens_segment: bool
    """`prompt_ids` are a whole prompt: of the first turn, or after a template that rewrote earlier text."""
    append: tuple[ChatMessage, ...] | str
    """From the request, as `tools`."""
    tools: tuple[str, ...] | None = None
    prompt_ids: bytes
    """int32 bytes [T] (`marlaas_api.wire`): only the tokens that this turn appended after its parent's output, unless it
    opens a segment.
    """
    output_ids: bytes
    """int32 bytes [T]."""
    logprobs: bytes
    """float32 bytes [T], one per output id, under the sampling policy at `temperature`."""
    text: str
    """The reply's text."""
    parts: ReplyPartsMessage | None = None
    """None if text, content and raw are equal."""
    opening: str = ""
    """Beginning of the assistant's message that stands in the prompt, from the chat template (`<think>`) or the request."""
    stop_reason: StopReason
    temperature: float
    meter: Meter
    num_preemptions: int = 0
    """Of the job before the request."""
    unfit_tokens: int = 0
    """Length of a prompt that is too long for the context window; otherwise 0. Such a prompt is not fed to the engine, and only its
    beginning and a digest are recorded.
    """
    context_tokens: int = 0
    """Length of the window that such a prompt did not fit; otherwise 0."""
    is_overtime: bool = False
    """The turn's time limit ended it, with the stop reason LENGTH."""
    demonstration: ChatMessage | None = None
    """From the request; such a turn was not sampled, so it has no version, adapter, logprobs and cost."""
    scores: int | None = None
    """From the request. `logprobs` are then those, at temperature 1, of the tokens that were generated in the conversation that ends with
    this turn, oldest first; NaN beyond the engine's context window. There are no ids.
    """
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary, in which ids are read; only in jobs that distil."""
    replica: str
    at: float

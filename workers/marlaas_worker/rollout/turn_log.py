"""The record of a turn, the log that stores it, and the cached conversations that later turns continue.

`turn_record` and `demonstrated_record` compute a record from the inputs and the result of a generation or of a demonstration,
without an engine and without I/O. The first record of a turn counts, whichever replica wrote it. A conversation that is not
cached is restored from the turns stream through its parent turns.
"""

import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from marlaas_api import subjects, wire
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus, Stored, StreamFull
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedSubject, Overtaken
from marlaas_api.messages import GenerateRequest, JobAgent, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef, request_id
from marlaas_api.retries import patiently
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.rollout.conversation import Conversation, Prompt, Tokenizer, beginning, restore
from marlaas_worker.rollout.demonstrated import Demonstration
from marlaas_worker.rollout.engine import Completion, EngineLimits
from marlaas_worker.rollout.policies import RequestRefused
from marlaas_worker.rollout.replies import EndingTokenizer, ReadReply
from marlaas_worker.rollout.request_limiter import Account, account_of
from marlaas_worker.rollout.served_jobs import History, ServedJob

COPIED = {"namespace", "job", "uid", "agent", "group", "member", "episode", "turn", "parent"}
"""Fields of a request that its record repeats."""
_HEADROOM_BYTES = 4096
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
_MESSAGE_BYTES = 256
"""Stream bytes per message besides its data: subject, headers, and the stream's own record."""
_BYTES_PER_ID = 4
_MESSAGE_OBJECT_BYTES = 512

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """Inputs of one generation, or of one score: the logprobs of given tokens.

    Attributes:
        request: the request for the turn.
        served: the agent that generates or scores, with the job's document.
        job: the job's state on this replica.
        tokenizer: with the job's chat template; for a score, the pool's.
        adapter: the version that samples the turn or scores the prompt.
        prompt: the turn's prompt; for a score, the segment whose tokens are scored.
        began: when the request arrived, or the scoring of this segment began, on the loop's clock.
        num_preemptions: number of the job's preemptions before this generation or score.
        vocabulary: digest of the tokenizer's vocabulary, for the record; empty if the job does not distil.
    """

    request: GenerateRequest
    served: JobAgent
    job: ServedJob
    tokenizer: EndingTokenizer
    adapter: AdapterRef
    prompt: Prompt
    began: float
    num_preemptions: int
    vocabulary: str = ""

    @property
    def is_score(self) -> bool:
        """Whether the prompt is scored, and nothing is generated."""
        return self.request.scores is not None

    @property
    def account(self) -> Account:
        """The account that the generation is charged to."""
        return account_of(self.served.document, self.request.agent)

    def max_tokens(self, limits: EngineLimits) -> int:
        """Return the most tokens that may be generated: the least of the request's limit, the job's limit and the room in the context window.

        The result is 0 or negative if the prompt leaves no room for a reply. limits: of the engine.
        """
        most = self.served.document.spec.sampling(self.request.group).max_tokens
        return min(self.request.max_tokens or most, most, self.prompt.room(limits.max_model_len))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of one generation or score: the completion, and the time that it took.

    Attributes:
        completion: the tokens and logprobs; for a score, the logprobs only.
        sha256: hash (hex) of the adapter's tensors file.
        queue_s: seconds from `Order.began` until the request entered the engine.
        engine_s: seconds in the engine.
        share_s: the request's share of the engine's time, in seconds (`Meter.share_s`).
        context_tokens: size of the context window in tokens, if the prompt leaves no room in it for a reply; else 0.
    """

    completion: Completion
    sha256: str
    queue_s: float = 0.0
    engine_s: float = 0.0
    share_s: float = 0.0
    context_tokens: int = 0


def turn_record(order: Order, drawn: Drawn, reply: ReadReply, replica: str, at: float) -> Turn:
    """Return a generated turn's record.

    A prompt that left no room in the context window was not given to the engine. The record then has no ids, and a long append is
    shortened (`conversation.beginning`).

    Args:
        order: inputs of the generation.
        drawn: its result.
        reply: the parsed completion.
        replica: this replica's name.
        at: now, in unix seconds.
    """
    request, prompt, completion = order.request, order.prompt, drawn.completion
    num_prompt = len(prompt.past) + len(prompt.appended)
    fed = len(completion.output_ids) > 0 or completion.stop_reason is not StopReason.CONTEXT
    append, tools = (request.append, request.tools) if fed else beginning(request)
    return Turn(
        **request.model_dump(include=COPIED),
        append=append,
        tools=tools,
        version=order.adapter.version,
        adapter_sha256=drawn.sha256,
        opens_segment=prompt.draft.opens_segment if fed else request.parent is None,
        prompt_ids=pack_ids(prompt.appended) if fed else b"",
        output_ids=pack_ids(completion.output_ids),
        logprobs=pack_logprobs(completion.logprobs),
        text=reply.text,
        parts=reply.parts,
        opening=prompt.draft.opening if fed else "",
        stop_reason=completion.stop_reason,
        temperature=order.served.document.spec.sampling(request.group).temperature,
        meter=Meter(
            prompt_tokens=num_prompt if fed else 0,
            cached_tokens=completion.cached_tokens,
            output_tokens=len(completion.output_ids),
            queue_s=drawn.queue_s,
            engine_s=drawn.engine_s,
            share_s=drawn.share_s,
        ),
        num_preemptions=order.num_preemptions,
        unfit_tokens=num_prompt if drawn.context_tokens else 0,
        context_tokens=drawn.context_tokens,
        is_overtime=completion.is_overtime,
        vocabulary=order.vocabulary,
        replica=replica,
        at=at,
    )


def demonstrated_record(
    request: GenerateRequest, demonstration: Demonstration, reply: ReadReply, replica: str, at: float
) -> Turn:
    """Return the record of a turn with a demonstrated reply: no version has sampled the reply, so it has no cost and no logprobs.

    Args:
        demonstration: the turn's prompt and reply as token ids.
        reply: the parsed demonstration.
        replica: this replica's name.
        at: now, in unix seconds.
    """
    prompt, completion = demonstration.prompt, demonstration.completion
    return Turn(
        **request.model_dump(include=COPIED),
        append=request.append,
        tools=request.tools,
        demonstration=request.demonstration,
        version=0,
        adapter_sha256="",
        opens_segment=prompt.draft.opens_segment,
        prompt_ids=pack_ids(prompt.appended),
        output_ids=pack_ids(completion.output_ids),
        logprobs=b"",
        text=reply.text,
        parts=reply.parts,
        opening=prompt.draft.opening,
        stop_reason=completion.stop_reason,
        temperature=1.0,
        meter=Meter(prompt_tokens=0, output_tokens=0),
        replica=replica,
        at=at,
    )


class TurnLost(Permanent):
    """The stream rejected a turn as already recorded, but the recorded turn cannot be read."""


class TurnUnseen(Retryable):
    """A turn that is to be scored is not recorded yet, or the server of the bus that answered has not received it yet."""


class TurnLog:
    """Writes turns to the turns stream and reads them; turns above the bus's payload limit go through the blob store."""

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self._bus = bus
        self._blobs = blobs
        self._waiting: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Turns that wait because the stream is full."""
        return len(self._waiting)

    def explain(self) -> str:
        """Return a sentence for an error message: whether the stream is full."""
        return f"the stream {subjects.TURNS} is full" if self._waiting else f"the stream {subjects.TURNS} has room"

    async def find(self, namespace: str, job: str, episode: str, number: int) -> Turn | None:
        """Return the turn with this number in an episode; None if it is not recorded. Raises BusUnavailable, and as `wire.unpack`."""
        stored = await self._bus.last(subjects.TURNS, subjects.turn(namespace, job, episode, number))
        return None if stored is None else await self._read(stored)

    async def episode(self, namespace: str, job: str, episode: str) -> dict[int, Turn]:
        """Return all recorded turns of an episode by number. Raises as `find`."""
        stored = await self._bus.replay(subjects.TURNS, subjects.turn(namespace, job, episode, "*"))
        turns = [await self._read(one) for one in stored]
        return {turn.turn: turn for turn in turns}

    async def record(self, job: ServedJob, turn: Turn) -> Turn:
        """Store a turn, and return it. If a turn with its episode and number is stored already, return that turn instead.

        Retries with backoff, until cancelled, while the bus or the blob store is unavailable, the store refuses the
        credentials, or the stream is full. Raises TurnLost.

        job: the state of the turn's job; the stored bytes are added to its `turn_bytes`.
        """
        name = request_id(turn.episode, turn.turn)
        limit = self._bus.max_payload_bytes - _HEADROOM_BYTES
        data = await self._persist(lambda: wire.pack(turn, self._blobs, limit), name)
        # The message id of the one write is this replica's own: another replica's turn is not taken for it.
        subject = FencedSubject(self._bus, subjects.turn(turn.namespace, turn.job, turn.episode, turn.turn))

        async def publish() -> None:
            failpoint("rollout.record.before_publish")
            try:
                await subject.append(data)
            except StreamFull:
                self._waiting.add(name)
                raise

        try:
            await self._persist(publish, name)
        except Overtaken:
            return await self._persist(lambda: self._first(turn), name)
        finally:
            self._waiting.discard(name)
        job.turn_bytes += len(data) + _MESSAGE_BYTES
        failpoint("rollout.record.after_publish")
        return turn

    async def parent(self, job: ServedJob, request: GenerateRequest, tokenizer: Tokenizer) -> Conversation | None:
        """Return the conversation that a request continues; None if the request begins one. tokenizer: with the job's chat template.

        Raises RequestRefused (the parent turn is not recorded, or is another agent's), and as `find` and `conversation.restore`.
        """
        if request.parent is None:
            return None
        key = request.agent, request.episode, request.parent
        if (known := job.histories.get(key)) is not None:
            return known.conversation
        turns = await self.episode(request.namespace, request.job, request.episode)
        conversation: Conversation | None = None
        for turn in reversed(_lineage(turns, request.parent, request)):
            conversation = restore(tokenizer, conversation, turn)
        assert conversation is not None
        is_continued = any(turn.parent == request.parent for turn in turns.values())
        _add(job, key, History(conversation, has_branches=is_continued))
        return conversation

    async def scored(self, request: GenerateRequest) -> list[Turn]:
        """Return the turns of the conversation that a request scores, oldest first. Raises TurnUnseen, and as `find`."""
        turns = await self.episode(request.namespace, request.job, request.episode)
        lineage: list[Turn] = []
        following = request.scores
        while following is not None:
            if (turn := turns.get(following)) is None:
                raise TurnUnseen(f"turn {following} of episode {request.episode} is not recorded yet")
            lineage.append(turn)
            following = turn.parent
        return lineage[::-1]

    async def _persist(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        level = logging.DEBUG if self._waiting else logging.WARNING  # with a full stream, every turn waits
        return await patiently(call, f"turn {name}", _FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S, level=level)

    async def _first(self, turn: Turn) -> Turn:
        stored = await self.find(turn.namespace, turn.job, turn.episode, turn.turn)
        if stored is None:
            raise TurnLost(f"turn {turn.turn} of {turn.episode} is recorded, but cannot be read")
        return stored

    async def _read(self, stored: Stored) -> Turn:
        message = await wire.unpack(stored.data, self._blobs, stored.subject)
        if not isinstance(message, Turn):
            raise wire.BadMessage(f"expected Turn, found {type(message).__name__}")
        return message


def knows_parent(job: ServedJob, request: GenerateRequest) -> bool:
    """Return whether the conversation that a request continues is cached; True also if the request begins a conversation."""
    return request.parent is None or (request.agent, request.episode, request.parent) in job.histories


def add_history(job: ServedJob, turn: GenerateRequest | Turn, conversation: Conversation) -> None:
    """Cache the conversation that ends with a turn.

    The new entry replaces that of the parent turn, so that an episode without branches takes one entry. If a second turn has the same
    parent, `TurnLog.parent` restores the parent's entry from the stream. That entry is then not replaced, because more turns may continue it.

    Args:
        job: the state of the turn's job, with the cache.
        turn: the turn's record or request.
    """
    if turn.parent is not None:
        replaced = turn.agent, turn.episode, turn.parent
        if replaced in job.histories and not job.histories[replaced].has_branches:
            job.histories.drop(replaced)
    _add(job, (turn.agent, turn.episode, turn.turn), History(conversation))


def require_same(turn: Turn, request: GenerateRequest) -> Turn:
    """Check that a recorded turn is the one that a request asks for, and return it.

    Raises RequestRefused if agent, parent or content of the turn differ from the request's.

    After a crash of the bus a task may be played twice under the same names, and the environment may write other texts
    in the second play. The recorded reply answers the other play's text: this play would score it, and it would be
    trained with the other prompt. After the refusal this play ends as a fault and is repeated under a new name.
    """
    if turn.agent != request.agent:
        raise RequestRefused(f"turn {turn.turn} of episode {turn.episode} is agent {turn.agent}'s")
    wanted = (request.append, request.tools)
    is_same = turn.parent == request.parent and turn.demonstration == request.demonstration
    if not is_same or (turn.append, turn.tools) not in (wanted, beginning(request)):
        raise RequestRefused(
            f"turn {turn.turn} of episode {turn.episode} is recorded with another parent or text: another play has this name"
        )
    return turn


def _lineage(turns: dict[int, Turn], number: int, request: GenerateRequest) -> list[Turn]:
    """Return a turn and its ancestors, newest first. Raises RequestRefused if one is missing or another agent's.

    Args:
        turns: the turns of the episode, by number.
        number: of the turn.
        request: names the agent, and the episode for the error text.
    """
    lineage: list[Turn] = []
    following: int | None = number
    while following is not None:
        turn = turns.get(following)
        if turn is None or (lineage and turn.turn >= lineage[-1].turn and turn in lineage):
            raise RequestRefused(f"turn {following} of episode {request.episode} is not recorded")
        if turn.agent != request.agent:
            raise RequestRefused(f"turn {following} of episode {request.episode} is agent {turn.agent}'s")
        lineage.append(turn)
        following = turn.parent
    return lineage


def _add(job: ServedJob, key: tuple[str, str, int], history: History) -> None:
    if key not in job.histories:
        job.histories.put(key, history, _weight(history.conversation))


def _weight(conversation: Conversation) -> int:
    """Return the approximate bytes of a conversation.

    Its text counts too: a prompt beyond the context window adds no ids, but its text may be as long as a bus message.
    """
    contents = (message.content for message in conversation.history or ())
    text = sum(map(sys.getsizeof, (conversation.text, conversation.reply, *contents)))
    return _BYTES_PER_ID * len(conversation.ids) + text + _MESSAGE_OBJECT_BYTES * len(conversation.history or ())

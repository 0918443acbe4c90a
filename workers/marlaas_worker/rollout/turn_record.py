"""The record of a turn, computed from the inputs and the result of a generation, a demonstration or a score. No engine and no I/O.

A score has a teacher's logprobs of a student's conversation. Its ids are those that were fed to the student's engine and sampled by it;
no text is tokenized. Each segment of a conversation is one context. So after the last turn, a conversation is scored in one forward
pass per segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlaas_api.messages import GenerateRequest, JobAgent, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef
from marlaas_api.wire import pack_ids, pack_logprobs, unpack_ids
from marlaas_worker.rollout.conversation import NO_IDS, BadAppend, Draft, Ids, Prompt, beginning
from marlaas_worker.rollout.demonstrated import Demonstration
from marlaas_worker.rollout.engine import Completion, EngineLimits
from marlaas_worker.rollout.replies import ReadReply
from marlaas_worker.rollout.request_limiter import Account, account_of
from marlaas_worker.rollout.served_jobs import ServedJob
from marlaas_worker.rollout.templates import EndingTokenizer

COPIED = {"namespace", "job", "uid", "agent", "group", "member", "episode", "turn", "parent"}
SCORE_TEMPERATURE = 1.0
"""Temperature at which engines score (`engine.Engine.score`)."""


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


class OtherVocabulary(BadAppend):
    """The student's ids have another meaning in the teacher's vocabulary."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One segment of a student's conversation, which is scored in one forward pass.

    ids: all prompts and outputs of its turns, int32 [T]. generated: True for the ids that the student sampled, bool [T].
    """

    ids: Ids
    generated: npt.NDArray[np.bool_]

    def prompt(self, max_model_len: int) -> Prompt:
        """Return the segment as an engine's prompt, cut to max_model_len - 1 ids: engines generate one token with a score.

        max_model_len: the teacher's context window, in tokens.
        """
        return Prompt(Draft(None, "", "", "", opens_segment=True), NO_IDS, self.ids[: max_model_len - 1])

    def of_generated(self, logprobs: Sequence[float]) -> npt.NDArray[np.float32]:
        """Return one logprob for each generated id, float32; NaN for an id that was not scored, because the context window ended before it.

        logprobs: the engine's scores, of the segment's second id and those that follow.
        """
        known = np.full(len(self.ids), np.nan, np.float32)
        known[1 : 1 + len(logprobs)] = logprobs
        return known[self.generated]


def segments(lineage: Sequence[Turn]) -> list[Scored]:
    """Cut a conversation into its segments; the turns of a segment share one context. lineage: the conversation's turns, oldest first."""
    parts: list[list[Turn]] = []
    for turn in lineage:
        if turn.opens_segment or not parts:
            parts.append([])
        parts[-1].append(turn)
    return [_segment(part) for part in parts]


def _segment(turns: Sequence[Turn]) -> Scored:
    pieces = [
        (unpack_ids(ids), is_output)
        for turn in turns
        for ids, is_output in ((turn.prompt_ids, False), (turn.output_ids, True))
    ]
    generated = [np.full(len(ids), is_output) for ids, is_output in pieces]
    return Scored(np.concatenate([ids for ids, _ in pieces]), np.concatenate(generated))


def require_vocabulary(lineage: Sequence[Turn], own: str, teacher: str) -> None:
    """Raise OtherVocabulary unless the ids of all turns are of the teacher's vocabulary.

    Args:
        lineage: turns of the student's conversation.
        own: digest of the teacher's vocabulary.
        teacher: name of the teacher's agent, for the error.
    """
    for turn in lineage:
        if turn.vocabulary != own:
            raise OtherVocabulary(
                f"the tokens of agent {turn.agent!r} are of a vocabulary with digest {turn.vocabulary[:12] or 'unknown'}, and those of its teacher "
                f"{teacher!r} of one with digest {own[:12]}: token ids mean different texts, so the teacher cannot score them. Choose a teacher whose "
                "model has the tokenizer of the student's"
            )


def score_record(
    request: GenerateRequest, adapter: AdapterRef, found: Sequence[tuple[Scored, Drawn]], replica: str, at: float
) -> Turn:
    """Return the turn that records a conversation's scores: the teacher's logprobs of all tokens that the student sampled.

    Args:
        request: asks for the scores.
        adapter: the teacher's version, which gave the scores.
        found: the segments that were scored, oldest first, with the engine's results.
        replica: name of this replica.
        at: now, in unix seconds.
    """
    drawn = [one for _, one in found]
    logprobs = [scored.of_generated(one.completion.logprobs) for scored, one in found]
    return Turn(
        **request.model_dump(include=COPIED),
        scores=request.scores,
        append="",
        version=adapter.version,
        adapter_sha256=next((one.sha256 for one in drawn), ""),
        opens_segment=True,
        prompt_ids=b"",
        output_ids=b"",
        logprobs=pack_logprobs(np.concatenate([np.zeros(0, np.float32), *logprobs]).tolist()),
        text="",
        stop_reason=StopReason.STOP,
        temperature=SCORE_TEMPERATURE,
        meter=Meter(
            prompt_tokens=sum(1 + len(one.completion.logprobs) for one in drawn),
            output_tokens=0,
            queue_s=sum(one.queue_s for one in drawn),
            engine_s=sum(one.engine_s for one in drawn),
            share_s=sum(one.share_s for one in drawn),
        ),
        replica=replica,
        at=at,
    )

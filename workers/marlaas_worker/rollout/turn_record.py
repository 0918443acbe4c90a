"""Inputs and result of a generation, and the turn's record that is computed from both. No engine and no I/O."""

from dataclasses import dataclass

from marlaas_api.messages import GenerateRequest, JobAgent, Meter, StopReason, Turn
from marlaas_api.names import AdapterRef
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.rollout.accounts import Account, account_of
from marlaas_worker.rollout.conversation import Prompt, beginning
from marlaas_worker.rollout.demonstrated import Demonstration
from marlaas_worker.rollout.engine import Completion, EngineLimits
from marlaas_worker.rollout.renderers.replies import ReadReply
from marlaas_worker.rollout.served_jobs import ServedJob
from marlaas_worker.rollout.templates import EndingTokenizer

COPIED = {"namespace", "job", "uid", "agent", "group", "member", "episode", "turn", "parent"}


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

"""From a completion to the reply that is recorded and sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from marlaas.models.families import THINK, THINK_END
from marlaas_api.messages import ReplyPartsMessage, StopReason
from marlaas_worker.rollout.conversation import Draft, Prompt, Tokenizer, read_reply
from marlaas_worker.rollout.stops import WritingTokenizer


class ReadingTokenizer(Tokenizer, WritingTokenizer, Protocol):
    """A tokenizer that reads replies as its model family writes them."""

    def parts(self, ids: Sequence[int], before: str, tools: Sequence[str]) -> ReplyPartsMessage | None:
        """Read a reply's ids without the end token (`renderers.Renderer.parts`)."""
        ...


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A reply's text, and its parts; None if they are the text."""

    text: str
    parts: ReplyPartsMessage | None


def read(tokenizer: ReadingTokenizer, prompt: Prompt, output_ids: Sequence[int], stop_reason: StopReason) -> ReadReply:
    """Read the reply to a prompt.

    A tool call that the environment has begun (an assistant's message at the end of `Agent.ask`) is one of the reply's calls.
    """
    draft = prompt.draft
    spoken = output_ids[:-1] if stop_reason is StopReason.STOP else output_ids
    before = draft.text.removesuffix(draft.begun.removeprefix(draft.opening)) if draft.history else draft.text
    if THINK in draft.opening and THINK_END not in draft.opening:
        before = draft.text.removesuffix(draft.opening) + THINK  # also if the environment has begun the reasoning
    reply = ReadReply(read_reply(tokenizer, output_ids, stop_reason), tokenizer.parts(spoken, before, draft.tools))
    return _with_begun_call(tokenizer, draft, spoken, reply) if draft.history and draft.opening else reply


def _with_begun_call(tokenizer: ReadingTokenizer, draft: Draft, spoken: Sequence[int], reply: ReadReply) -> ReadReply:
    """Return the reply with the calls of opening and reply together, if they are more than its own."""
    opened, before = tokenizer.encode(draft.opening), draft.text.removesuffix(draft.begun)
    own, given, whole = (
        reply.parts,
        *(tokenizer.parts(ids, before, draft.tools) for ids in (opened, [*opened, *spoken])),
    )
    if whole is None or len(whole.tool_calls) <= len(own.tool_calls if own else ()):
        return reply
    begun = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole.content, draft.opening, strict=False)))
    parts = ReplyPartsMessage(
        reasoning=own.reasoning if own else "",
        content=whole.content[begun:],
        tool_calls=whole.tool_calls[len(given.tool_calls if given else ()) :],
        raw=own.raw if own else reply.text,
    )
    return ReadReply(reply.text, parts)

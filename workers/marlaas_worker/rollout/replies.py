"""Parses a completion into the reply that is recorded and sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from marlaas.models.families import THINK, THINK_END
from marlaas_api.messages import ReplyPartsMessage, StopReason
from marlaas_worker.rollout.conversation import Draft, Prompt, Tokenizer, read_reply
from marlaas_worker.rollout.stops import WritingTokenizer


class ReadingTokenizer(Tokenizer, WritingTokenizer, Protocol):
    """Tokenizer interface of this module, which also parses replies. Implemented by `tokenizer.PretrainedTokenizer`."""

    def parts(self, ids: Sequence[int], before: str, tools: Sequence[str]) -> ReplyPartsMessage | None:
        """Parse a reply's ids, without the end token (`renderer.Renderer.parts`)."""
        ...


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A reply's text, and its parts: reasoning, content, tool calls, raw text. parts: None if text, content and raw text are equal."""

    text: str
    parts: ReplyPartsMessage | None


def read(tokenizer: ReadingTokenizer, prompt: Prompt, output_ids: Sequence[int], stop_reason: StopReason) -> ReadReply:
    """Parse a completion into its text, and into reasoning, content and tool calls in the format of the model family.

    The prompt may end with the beginning of the assistant's message, from the template or from the environment (a prefill). A tool call
    that starts there belongs to the reply.

    Args:
        output_ids: the generated ids; with the end token if `stop_reason` is STOP.
    """
    draft = prompt.draft
    spoken = output_ids[:-1] if stop_reason is StopReason.STOP else output_ids
    before = draft.text.removesuffix(draft.begun.removeprefix(draft.opening)) if draft.history else draft.text
    if THINK in draft.opening and THINK_END not in draft.opening:
        before = draft.text.removesuffix(draft.opening) + THINK  # also if the environment has begun the reasoning
    reply = ReadReply(read_reply(tokenizer, output_ids, stop_reason), tokenizer.parts(spoken, before, draft.tools))
    return _with_begun_call(tokenizer, draft, spoken, reply) if draft.history and draft.opening else reply


def _with_begun_call(tokenizer: ReadingTokenizer, draft: Draft, spoken: Sequence[int], reply: ReadReply) -> ReadReply:
    """Return the reply with a tool call that begins in the prompt's opening: opening and output are parsed together.

    Calls that are complete in the opening are left out. If no further call is found, the reply is returned as it is.

    Args:
        draft: the prompt; `Draft.opening` is the beginning of the assistant's message in it.
        spoken: the output's ids without the end token.
        reply: the output parsed alone.
    """
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

"""Warns if a chat template rewrites its past, or writes no header for a reply.

Each turn after a rewrite opens a new segment, which costs a prefill and training time. Correct tokens do
not depend on this warning: every turn is checked in `conversation`. The warning is for people. It tries a few
typical replies, so it may miss a template that rewrites the past after other replies.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_worker.rollout.conversation import BadAppend, conclude, extend, read_reply
from marlaas_worker.rollout.renderers.replies import ReadingTokenizer

REASON = "TemplateRewritesPast"
NO_PROMPT = "TemplateLacksGenerationPrompt"
_REPLIES = {
    "any reply": "four",
    "a reply with spaces or line ends around it": " four\n",
    "a reply with reasoning (<think>…</think>)": "<think>\ntwo and two\n</think>\n\nfour",
    "a tool call (<tool_call>…</tool_call>)": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
}
_REWRITES = (
    "the base model's chat template rewrites its past after {}: the next turn of such a conversation opens a new segment, with its "
    "whole prompt again"
)
_USER = (ChatMessage(role="user", content="two and two?"),)


class EndingTokenizer(ReadingTokenizer, Protocol):
    """A tokenizer that knows the end tokens of replies."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary(self) -> str:
        """Digest of the tokens with their ids. Where two tokenizers have the same, ids mean the same texts."""
        ...

    def whole(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Render a conversation that ends with a complete assistant's message. Raises BadAppend."""
        ...

    def for_job(self, template: ChatTemplateSettings) -> "EndingTokenizer":
        """Return the tokenizer with a job's chat template, where this one has the pool's. Raises InvalidInput."""
        ...


def rewritten(tokenizer: EndingTokenizer) -> tuple[str, ...]:
    """Return descriptions of the replies after which the template rewrites its past; empty without a chat template."""
    try:
        ends = sorted(tokenizer.end_ids)
        return tuple(words for words, text in _REPLIES.items() if all(_rewrites(tokenizer, text, end) for end in ends))
    except BadAppend:
        return ()


def warnings(tokenizer: EndingTokenizer) -> Mapping[str, str]:
    """Return the warnings about a tokenizer's template, by reason."""
    found = rewritten(tokenizer)
    texts = {REASON: _REWRITES.format(", ".join(found)) if found else "", NO_PROMPT: tokenizer.frame.problem}
    return {reason: text for reason, text in texts.items() if text}


def _rewrites(tokenizer: EndingTokenizer, text: str, end: int) -> bool:
    """Return whether the template rewrites the past within two turns: some keep the last reply and rewrite the one before."""
    conversation = None
    for _ in range(2):
        prompt = extend(tokenizer, conversation, _USER)
        if conversation is not None and prompt.draft.opens_segment:
            return True
        output = [*tokenizer.encode(text.removeprefix(prompt.draft.opening)), end]
        conversation = conclude(prompt, read_reply(tokenizer, output, StopReason.STOP), output, StopReason.STOP)
    return extend(tokenizer, conversation, _USER).draft.opens_segment

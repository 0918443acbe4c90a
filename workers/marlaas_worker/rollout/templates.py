"""Warnings about chat templates that rewrite earlier turns or write no header.

Each turn after a rewrite opens a new segment, which costs a prefill and training time. The warning is for people:
tokens are correct without it, because `conversation` checks every turn. The check tries a few typical replies, so it
may miss a template that rewrites earlier turns after other replies.
"""

from collections.abc import Mapping

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import BadAppend, conclude, extend, read_reply
from marlaas_worker.rollout.replies import EndingTokenizer

REWRITES_PAST = "TemplateRewritesPast"
NO_PROMPT = "TemplateLacksGenerationPrompt"
_REPLIES = {
    "any reply": "four",
    "a reply with spaces or line ends around it": " four\n",
    "a reply with reasoning (<think>…</think>)": "<think>\ntwo and two\n</think>\n\nfour",
    "a tool call (<tool_call>…</tool_call>)": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
}
_REWRITES = (
    "the chat template rewrites earlier turns after {}: the next turn of such a conversation opens a new segment, with its whole prompt "
    "again"
)
_USER = (ChatMessage(role="user", content="two and two?"),)


def rewritten(tokenizer: EndingTokenizer) -> tuple[str, ...]:
    """Return descriptions of the typical replies after which the tokenizer's template rewrites earlier turns.

    Empty if there is no such reply, or the tokenizer has no usable template or no end token.
    """
    try:
        ends = sorted(tokenizer.end_ids)
        if not ends:
            return ()
        return tuple(words for words, text in _REPLIES.items() if all(_rewrites(tokenizer, text, end) for end in ends))
    except BadAppend:
        return ()


def warnings(tokenizer: EndingTokenizer) -> Mapping[str, str]:
    """Return the warnings about a tokenizer's template, by the reason of the event (REWRITES_PAST, NO_PROMPT); empty if there are none."""
    found = rewritten(tokenizer)
    texts = {REWRITES_PAST: _REWRITES.format(", ".join(found)) if found else "", NO_PROMPT: tokenizer.frame.problem}
    return {reason: text for reason, text in texts.items() if text}


def _rewrites(tokenizer: EndingTokenizer, text: str, end: int) -> bool:
    """Return whether the template rewrites a reply within two turns. Some templates keep the last reply, and rewrite the one before it.

    text: the reply. end: id of its end token.
    """
    conversation = None
    for _ in range(2):
        prompt = extend(tokenizer, conversation, _USER)
        if conversation is not None and prompt.draft.opens_segment:
            return True
        output = [*tokenizer.encode(text.removeprefix(prompt.draft.opening)), end]
        conversation = conclude(prompt, read_reply(tokenizer, output, StopReason.STOP), output, StopReason.STOP)
    return extend(tokenizer, conversation, _USER).draft.opens_segment

"""Tokenizes a demonstrated reply: computes the ids that the policy would have generated if it had given this reply.

The text of the ids is the chat template's rendering of the message after the generation prompt, up to and with the end token. Pure, as
`conversation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.models.chat_template import reply_in, split_end
from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import (
    Append,
    BadAppend,
    Conversation,
    Prompt,
    Tools,
    extend,
    num_characters,
    require_shown,
)
from marlaas_worker.rollout.engine import Completion
from marlaas_worker.rollout.replies import EndingTokenizer

_OTHERWISE = (
    "the chat template writes a demonstrated reply in another way than it prompts for one, so its tokens are not those that the policy would "
    "generate: choose another template (`rollout.chatTemplate`)"
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A turn with a demonstrated reply. prompt: the turn's prompt. completion: the reply's ids, with the end token and without logprobs."""

    prompt: Prompt
    completion: Completion


def demonstrated(
    tokenizer: EndingTokenizer, parent: Conversation | None, append: Append, tools: Tools, reply: ChatMessage
) -> Demonstration:
    """Tokenize a turn with a demonstrated reply: its prompt, as `conversation.extend` does, and the reply.

    Args:
        tokenizer, parent, append, tools: as in `conversation.extend`.
        reply: the demonstrated message; its role is assistant.

    Raises:
        BadAppend: as `conversation.extend`; or the conversation is no chat, or full; or the reply is empty or contains an end token; or no
            end token is known; or the template writes the reply in a form that it does not prompt for.
    """
    prompt = extend(tokenizer, parent, append, tools)
    draft = prompt.draft
    if draft.history is None or prompt.full or reply.role != "assistant":
        raise BadAppend("a demonstrated reply is an assistant's message that follows chat messages")
    whole = tokenizer.whole((*draft.history, reply), draft.tools)
    rendered = reply_in(whole, draft.text, draft.opening, reply.reasoning_content)
    if rendered is None:
        raise BadAppend(_OTHERWISE)
    text, end = _ended(tokenizer, rendered)
    ids = _ids_after(tokenizer, tokenizer.frame.header + draft.opening, text)
    inner = [tokenizer.token_text(one) for one in ids if one in tokenizer.end_ids]
    if inner or not ids:
        raise BadAppend(f"the demonstrated reply contains the end token {inner[0]}" if inner else "it is empty")
    require_shown(num_characters((reply,), None), len(ids))
    return Demonstration(prompt, Completion((*ids, end), (), StopReason.STOP))


def _ended(tokenizer: EndingTokenizer, text: str) -> tuple[str, int]:
    """Return a rendered reply's text without its end token, and the id of that token.

    If the template writes no end token after a reply, the id is the lowest one of the end tokens. Raises BadAppend if none is known.
    """
    texts = {tokenizer.token_text(one): one for one in sorted(tokenizer.end_ids, reverse=True)}
    if not texts:
        raise BadAppend("nothing names an end token of the base model, so a demonstrated reply could not end")
    spoken, end = split_end(text, texts)
    return (text.removesuffix(tokenizer.frame.ending), min(texts.values())) if end is None else (spoken, texts[end])


def _ids_after(tokenizer: EndingTokenizer, before: str, text: str) -> Sequence[int]:
    """Return the ids of `text` after `before`. Some tokenizers mark the beginning of a text; the ids do not contain that mark."""
    known, both = tokenizer.encode(before), tokenizer.encode(before + text)
    return both[len(known) :] if both[: len(known)] == known else tokenizer.encode(text)

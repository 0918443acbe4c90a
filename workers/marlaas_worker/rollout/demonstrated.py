"""A demonstrated reply as token ids: what the policy would have generated, had it said the demonstrated message.

The reply is the chat template's own rendering of the message, without what the generation prompt writes before it, up to
and with the end token. Pure, as `conversation`.
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
from marlaas_worker.rollout.templates import EndingTokenizer

_OTHERWISE = (
    "the chat template writes a demonstrated reply in another way than it prompts for one, so its tokens are not those that the policy would "
    "generate: choose another template (`rollout.chatTemplate`)"
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A turn whose reply is given: its prompt, and the reply with its end token."""

    prompt: Prompt
    completion: Completion


def demonstrated(
    tokenizer: EndingTokenizer, parent: Conversation | None, append: Append, tools: Tools, reply: ChatMessage
) -> Demonstration:
    """Append to a conversation, and give the reply. Arguments as of `conversation.extend`.

    Raises:
        BadAppend: also if the template writes the reply in another way than the policy could, or the reply contains an end token.
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
    """Split a rendered reply into its text and its end token."""
    texts = {tokenizer.token_text(one): one for one in sorted(tokenizer.end_ids, reverse=True)}
    if not texts:
        raise BadAppend("nothing names an end token of the base model, so a demonstrated reply could not end")
    spoken, end = split_end(text, texts)
    return (text.removesuffix(tokenizer.frame.ending), min(texts.values())) if end is None else (spoken, texts[end])


def _ids_after(tokenizer: EndingTokenizer, before: str, text: str) -> Sequence[int]:
    """Return the ids of a text that follows another one: some tokenizers mark the beginning of a text."""
    known, both = tokenizer.encode(before), tokenizer.encode(before + text)
    return both[len(known) :] if both[: len(known)] == known else tokenizer.encode(text)

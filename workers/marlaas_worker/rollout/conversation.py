"""Token in, token out: what a turn appends to a conversation, as ids that are made once and never again (DESIGN, promise 3).

Generated ids stay as they are; of the chat template's rendering only what lies beyond the conversation so far is tokenised. Whether the
template extends its past is checked at every turn, on text: the reply is an opaque piece of it, and its end token is part of what the
template must reproduce. If it does not (it trims, drops reasoning, changes a date), the turn opens a new segment with a whole new prompt.

Pure: knows neither transformers nor the bus. Conversations are values, so they branch by being used twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from marlaas_api.arrays import unpack_ids
from marlaas_api.errors import Permanent
from marlaas_api.messages import ChatMessage, StopReason, Turn

Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)


class BadAppend(Permanent):
    """What a sandbox wants to append cannot be rendered or tokenised; the text says why."""


class Tokenizer(Protocol):
    """What conversations need of a tokenizer; `tokenizer.PretrainedTokenizer` is the real one."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """The chat template's text, ready for the assistant to write; tools: JSON texts of functions. Raises BadAppend."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added to it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        ...

    def token_text(self, token: int) -> str:
        """How one token, special or not, stands in a rendered text."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to and including a reply.

    history: its chat messages but for the reply, empty if it began as raw text. reply: what the assistant has written since. text: the
    segment as the template shows it, without the end token. ids: the segment as the engine saw it, int32 [T]. end: the end token that was
    drawn, if one was. full: nothing more fits into the context window. tools: what the template is shown.
    """

    history: tuple[ChatMessage, ...]
    reply: str
    text: str
    ids: Ids
    end: int | None
    full: bool = False
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What a turn generates from, as text: `fresh` is the end of `text` that is not yet ids. `begun`: see `Conversation.reply`.

    after: the end token that the template's own continuation `fresh` follows. tools: see `Conversation.tools`.
    """

    history: tuple[ChatMessage, ...]
    begun: str
    text: str
    fresh: str
    opens_segment: bool
    after: int | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn generates from, as ids: the segment's `past` and what is `appended` to it, both int32 [T]."""

    draft: Draft
    past: Ids
    appended: Ids
    full: bool = False

    @property
    def ids(self) -> Ids:
        """What the engine is fed."""
        return np.concatenate((self.past, self.appended))

    def room(self, max_model_len: int) -> int:
        """Tokens that may still be generated; 0 or less: none."""
        return 0 if self.full else max_model_len - len(self.past) - len(self.appended)


def extend(
    tokenizer: Tokenizer,
    parent: Conversation | None,
    append: tuple[ChatMessage, ...] | str,
    tools: tuple[str, ...] | None = None,
) -> Prompt:
    """Append to a conversation (None: begin one); tools None: as before. Raises BadAppend."""
    draft = _draft(tokenizer, parent, append, tools)
    past = NO_IDS if parent is None or draft.opens_segment else parent.ids
    prompt = Prompt(draft, past, _ids(_fresh_ids(tokenizer, draft)), full=parent is not None and parent.full)
    if not prompt.full and len(past) + len(prompt.appended) == 0:
        raise BadAppend("there is nothing to generate from: append a message or some text")
    return prompt


def read_reply(tokenizer: Tokenizer, output_ids: Sequence[int], stop_reason: StopReason) -> str:
    """Text of generated ids: without the end token, and without other special tokens."""
    return tokenizer.decode(output_ids[:-1] if stop_reason is StopReason.STOP else output_ids)


def conclude(prompt: Prompt, text: str, output_ids: Sequence[int], stop_reason: StopReason) -> Conversation:
    """The conversation after a reply. Nothing generated at the end of the context closes it for good."""
    full = stop_reason is StopReason.CONTEXT and not len(output_ids)
    ids = prompt.past if full else np.concatenate((prompt.past, prompt.appended, _ids(output_ids)))
    return _concluded(prompt.draft, ids, text, int(ids[-1]) if stop_reason is StopReason.STOP else None, full)


def restore(tokenizer: Tokenizer, parent: Conversation | None, turn: Turn) -> Conversation:
    """The conversation after a recorded turn: ids are the record's, only the text is rendered again. Raises BadAppend."""
    output = unpack_ids(turn.output_ids)
    past = NO_IDS if parent is None or turn.opens_segment else parent.ids
    ids = np.concatenate((past, unpack_ids(turn.prompt_ids), output))
    full = turn.stop_reason is StopReason.CONTEXT and not len(output)
    end = int(output[-1]) if turn.stop_reason is StopReason.STOP else None
    return _concluded(_draft(tokenizer, parent, turn.append, turn.tools), ids, turn.text, end, full)


def _concluded(draft: Draft, ids: Ids, text: str, end: int | None, full: bool) -> Conversation:
    return Conversation(draft.history, draft.begun + text, draft.text + text, ids, end, full, draft.tools)


def _draft(
    tokenizer: Tokenizer,
    parent: Conversation | None,
    append: tuple[ChatMessage, ...] | str,
    tools: tuple[str, ...] | None,
) -> Draft:
    if isinstance(append, str):
        return _text_draft(tokenizer, parent, append)
    if tools is None:
        tools = () if parent is None else parent.tools
    return _chat_draft(tokenizer, parent, append, tools)


def _text_draft(tokenizer: Tokenizer, parent: Conversation | None, append: str) -> Draft:
    """Raw text goes on with what the assistant is writing, past its end token if there is one."""
    if parent is None:
        return Draft((), append, append, append, opens_segment=True)
    added = _end_text(tokenizer, parent) + append
    begun, text = parent.reply + added, parent.text + added
    return Draft(parent.history, begun, text, append, opens_segment=False, tools=parent.tools)


def _chat_draft(
    tokenizer: Tokenizer, parent: Conversation | None, append: tuple[ChatMessage, ...], tools: tuple[str, ...]
) -> Draft:
    """Tools are part of what the template shows: others than before are a rewritten past."""
    if parent is None:
        text = tokenizer.render(append, tools)
        return Draft(append, "", text, text, opens_segment=True, tools=tools)
    if not parent.history:
        raise BadAppend(
            "this conversation began as raw text and cannot go on as chat: append text, or begin a new conversation"
        )
    history = (*parent.history, ChatMessage(role="assistant", content=parent.reply), *append)
    text = tokenizer.render(history, tools)
    past = parent.text + _end_text(tokenizer, parent)
    if not text.startswith(past):
        return Draft(history, "", text, text, opens_segment=True, tools=tools)
    return Draft(history, "", text, text[len(past) :], opens_segment=False, after=parent.end, tools=tools)


def _fresh_ids(tokenizer: Tokenizer, draft: Draft) -> list[int]:
    """Ids of what is new. The end token that it follows is tokenised along and dropped again, as in a rendering from the beginning:
    so a tokenizer that marks the beginning of a text marks nothing here."""
    if draft.after is None:
        return tokenizer.encode(draft.fresh)
    ids = tokenizer.encode(tokenizer.token_text(draft.after) + draft.fresh)
    return ids[1:] if ids[:1] == [draft.after] else tokenizer.encode(draft.fresh)


def _end_text(tokenizer: Tokenizer, conversation: Conversation) -> str:
    return "" if conversation.end is None else tokenizer.token_text(conversation.end)


def _ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.int32)

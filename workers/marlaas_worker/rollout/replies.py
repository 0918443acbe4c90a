"""Replies as token ids: at which stop string or stop token they end, and their text, reasoning and tool calls.

A reply ends with the token that completes a stop string. That token and all before it are recorded and trained. Whether a token is
sampled depends only on the tokens before it, so the recorded tokens have the policy's distribution.

`read` parses a completion into the reply that is recorded and sent.

`EndingTokenizer` is the rollout role's interface of a tokenizer; `conversation.Tokenizer` is the part of it that `conversation` needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from marlaas.models.families import THINK, THINK_END
from marlaas_api.messages import ChatMessage, GenerateRequest, ReplyPartsMessage, StopReason
from marlaas_api.messages.job_spec import ChatTemplateSettings, SamplingSettings
from marlaas_worker.rollout.conversation import Draft, Prompt, Tokenizer, read_reply

_MARGIN = 8
"""Tokens that are decoded before the longest possible match, because some tokenizers drop a space at the beginning of a text."""


class EndingTokenizer(Tokenizer, Protocol):
    """Tokenizer interface of the rollout role. Implemented by `tokenizer.PretrainedTokenizer`.

    end_ids: ids of the tokens that end a reply.
    """

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary(self) -> str:
        """Digest of all tokens and their ids. If two tokenizers have the same digest, an id means the same text in both."""
        ...

    def raw(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        ...

    def parts(self, ids: Sequence[int], before: str, tools: Sequence[str]) -> ReplyPartsMessage | None:
        """Parse a reply's ids, without the end token (`renderer.Renderer.parts`)."""
        ...

    def whole(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Render a conversation that ends with a complete assistant's message. tools: JSON texts of functions. Raises BadAppend."""
        ...

    def for_job(self, template: ChatTemplateSettings) -> "EndingTokenizer":
        """Return a copy of this tokenizer with a job's chat template in place of the pool's. Raises InvalidInput.

        template: the job's settings. If they choose no template, the pool's stays. Their variables (`kwargs`) are merged over the pool's.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop strings of a request: the reply ends with the token that completes one of them.

    texts: the stop strings; at least one. raw: returns the text of ids, special tokens included.
    """

    texts: tuple[str, ...]
    raw: Callable[[Sequence[int]], str]
    _window: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(len(text.encode(errors="surrogatepass")) for text in self.texts)
        object.__setattr__(self, "_window", longest + _MARGIN)  # every token has at least one byte

    def end(self, ids: Sequence[int], checked: int = 0) -> int | None:
        """Return how many of a reply's ids form its shortest beginning with a stop string; None if the reply contains no stop string.

        checked: number of ids at the beginning that are known to contain no stop string.
        """
        for length in range(checked + 1, len(ids) + 1):
            text = self.raw(ids[max(0, length - self._window) : length])
            if any(one in text for one in self.texts):
                return length
        return None


def stops_of(
    tokenizer: EndingTokenizer, rollout: SamplingSettings, request: GenerateRequest
) -> tuple[Stops | None, frozenset[int]]:
    """Return the stop strings of a request's reply, None if it has none, and the ids of its stop tokens, without the model's end tokens.

    If a stop string is the text of a special token, the id of that token is among the stop tokens, too. rollout: the job's settings.
    """
    texts = tuple(dict.fromkeys((*rollout.stop, *request.stop)))
    special = [number for text in texts if (number := tokenizer.special_id(text)) is not None]
    return Stops(texts, tokenizer.raw) if texts else None, frozenset((*rollout.stop_token_ids, *special))


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A reply's text, and its parts: reasoning, content, tool calls, raw text. parts: None if text, content and raw text are equal."""

    text: str
    parts: ReplyPartsMessage | None


def read(tokenizer: EndingTokenizer, prompt: Prompt, output_ids: Sequence[int], stop_reason: StopReason) -> ReadReply:
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


def _with_begun_call(tokenizer: EndingTokenizer, draft: Draft, spoken: Sequence[int], reply: ReadReply) -> ReadReply:
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

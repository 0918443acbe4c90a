"""The chat templates of a replica's jobs: one tokenizer for each, and warnings about templates that rewrite earlier turns or write no header.

Each turn after a rewrite opens a new segment, which costs a prefill and training time. The warning is for people:
tokens are correct without it, because `conversation` checks every turn. The check tries a few typical replies, so it
may miss a template that rewrites earlier turns after other replies.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import ChatMessage, JobDocument, StopReason
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_worker.rollout.conversation import BadAppend, NoChatTemplate, conclude, extend, read_reply
from marlaas_worker.rollout.replies import ReadingTokenizer

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
_NONE = ChatTemplateSettings()


class EndingTokenizer(ReadingTokenizer, Protocol):
    """Tokenizer interface of the rollout role. Implemented by `tokenizer.PretrainedTokenizer`.

    end_ids: ids of the tokens that end a reply.
    """

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary(self) -> str:
        """Digest of all tokens and their ids. If two tokenizers have the same digest, an id means the same text in both."""
        ...

    def whole(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Render a conversation that ends with a complete assistant's message. tools: JSON texts of functions. Raises BadAppend."""
        ...

    def for_job(self, template: ChatTemplateSettings) -> "EndingTokenizer":
        """Return a copy of this tokenizer with a job's chat template in place of the pool's. Raises InvalidInput.

        template: the job's settings. If they choose no template, the pool's stays. Their variables (`kwargs`) are merged over the pool's.
        """
        ...


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
    """Return the warnings about a tokenizer's template, by the reason of the event (REASON, NO_PROMPT); empty if there are none."""
    found = rewritten(tokenizer)
    texts = {REASON: _REWRITES.format(", ".join(found)) if found else "", NO_PROMPT: tokenizer.frame.problem}
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


class Tokenizers:
    """Tokenizers by chat template. All have the same vocabulary. A tokenizer is dropped when no job uses its template.

    pool: the tokenizer with the pool's template.
    """

    def __init__(self, pool: EndingTokenizer) -> None:
        self.pool = pool
        self._made: dict[ChatTemplateSettings, EndingTokenizer] = {}

    def __len__(self) -> int:
        return 1 + len(self._made)

    async def of(self, document: JobDocument) -> EndingTokenizer:
        """Return the tokenizer with a job's chat template; make it if there is none. Raises NoChatTemplate if the template is missing or refused."""
        settings = document.spec.rollout.chat_template
        if settings == _NONE:
            return self.pool
        if (known := self._made.get(settings)) is not None:
            return known
        try:
            made = await asyncio.to_thread(self.pool.for_job, settings)
        except InvalidInput as error:
            raise NoChatTemplate(f"chatTemplate: {error}") from error
        return self._made.setdefault(settings, made)

    async def vocabulary(self) -> str:
        """Return the digest of the vocabulary that all these tokenizers share (`EndingTokenizer.vocabulary`)."""
        return await asyncio.to_thread(lambda: self.pool.vocabulary)

    def further_ends(self, tokenizer: EndingTokenizer) -> frozenset[int]:
        """Return the end tokens of a job's tokenizer that the pool's lacks. Requests must name them: the engine does not know them."""
        return tokenizer.end_ids - self.pool.end_ids

    def keep(self, documents: Iterable[JobDocument]) -> None:
        """Drop the tokenizers that none of these jobs uses."""
        used: Collection[ChatTemplateSettings] = {one.spec.rollout.chat_template for one in documents}
        self._made = {settings: one for settings, one in self._made.items() if settings in used}

"""From a completion to the reply that is recorded and sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from marlaas.models.families import THINK, THINK_END
from marlaas_api.messages import ReplyPartsMessage, StopReason
from marlaas_worker.rollout.conversation import Prompt, Tokenizer, read_reply
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
    """Read the reply to a prompt."""
    draft = prompt.draft
    spoken = output_ids[:-1] if stop_reason is StopReason.STOP else output_ids
    before = draft.text.removesuffix(draft.begun.removeprefix(draft.opening)) if draft.history else draft.text
    if THINK in draft.opening and THINK_END not in draft.opening:
        before = draft.text.removesuffix(draft.opening) + THINK  # also if the environment has begun the reasoning
    return ReadReply(read_reply(tokenizer, output_ids, stop_reason), tokenizer.parts(spoken, before, draft.tools))

"""Two conversations with the same user messages: one with the base model, one with the adapter.

Each side continues from its own replies, as an agent would, so the histories differ after the first turn. Pure
except for the speaker.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol


class Side(StrEnum):
    """Side of the chat: base model or adapter."""

    BASE = "base"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """Sampling settings. `temperature` None is greedy; both sides use the same `seed`."""

    max_tokens: int
    temperature: float | None
    seed: int = 0


Said = tuple[tuple[str, str], ...]
"""Messages of a conversation as (role, text)."""


class Speaker(Protocol):
    """Model that continues a conversation. `marlaas.chat.speakers` has the real one and a fake."""

    def reply(self, side: Side, said: Said, sampling: ChatSampling, hear: Callable[[str], None]) -> str:
        """Return the reply's text, and pass each piece to `hear` as it is generated."""
        ...


@dataclass(slots=True)
class Chat:
    """The conversations of both sides."""

    speaker: Speaker
    sampling: ChatSampling
    said: dict[Side, Said] = field(default_factory=lambda: dict.fromkeys(Side, ()))

    def ask(self, text: str, hear: Callable[[Side, str], None]) -> Iterator[tuple[Side, str]]:
        """Send `text` to both sides, one after the other, and yield each side's whole reply."""
        for side in Side:
            before = (*self.said[side], ("user", text))
            reply = self.speaker.reply(side, before, self.sampling, partial(hear, side))
            self.said[side] = (*before, ("assistant", reply))
            yield side, reply

    def begin(self) -> None:
        """Clear both conversations."""
        self.said = dict.fromkeys(Side, ())

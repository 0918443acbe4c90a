"""Two conversations that hear the same questions: one with the base model, one with the adapter. Pure but for who speaks.

Each side goes on with its own replies, as an agent would: after the first turn the two have different pasts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol


class Side(StrEnum):
    """Who speaks."""

    BASE = "base"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How tokens are drawn. temperature None: greedy, the likeliest token each time; seed: the same for both sides."""

    max_tokens: int
    temperature: float | None
    seed: int = 0


Said = tuple[tuple[str, str], ...]
"""(role, text) of a conversation so far."""


class Speaker(Protocol):
    """A model that goes on with a conversation; `marlaas.chat.speakers` has the real one, and a fake."""

    def reply(self, side: Side, said: Said, sampling: ChatSampling, hear: Callable[[str], None]) -> str:
        """Return the reply's text; `hear` gets its pieces as they are generated."""
        ...


@dataclass(slots=True)
class Chat:
    """Both conversations."""

    speaker: Speaker
    sampling: ChatSampling
    said: dict[Side, Said] = field(default_factory=lambda: dict.fromkeys(Side, ()))

    def ask(self, text: str, hear: Callable[[Side, str], None]) -> Iterator[tuple[Side, str]]:
        """Ask both sides, one after the other; yield each side's whole reply."""
        for side in Side:
            before = (*self.said[side], ("user", text))
            reply = self.speaker.reply(side, before, self.sampling, partial(hear, side))
            self.said[side] = (*before, ("assistant", reply))
            yield side, reply

    def begin(self) -> None:
        """Forget what was said."""
        self.said = dict.fromkeys(Side, ())

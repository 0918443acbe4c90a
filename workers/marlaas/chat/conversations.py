"""Two conversations with the same user messages, one with the base model, one with the adapter, and their display.

Each side continues from its own replies, as an agent would, so the histories differ after the first turn. Control
characters in a model's text are escaped, so that the terminal does not act on them. Imports no model library.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas_api.last_words import visible


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


Transcript = tuple[tuple[str, str], ...]
"""Messages of a conversation as (role, text)."""


class Speaker(Protocol):
    """Model that continues a conversation. `marlaas.chat.speakers` has the real one and a fake."""

    def reply(self, side: Side, transcript: Transcript, sampling: ChatSampling, on_text: Callable[[str], None]) -> str:
        """Return the reply's text, and pass each piece to `on_text` as it is generated."""
        ...


@dataclass(slots=True)
class Chat:
    """The conversations of both sides."""

    speaker: Speaker
    sampling: ChatSampling
    transcripts: dict[Side, Transcript] = field(default_factory=lambda: dict.fromkeys(Side, ()))

    def ask(self, text: str, on_text: Callable[[Side, str], None]) -> Iterator[tuple[Side, str]]:
        """Send `text` to both sides, one after the other, and yield each side's whole reply."""
        for side in Side:
            before = (*self.transcripts[side], ("user", text))
            reply = self.speaker.reply(side, before, self.sampling, partial(on_text, side))
            self.transcripts[side] = (*before, ("assistant", reply))
            yield side, reply

    def begin(self) -> None:
        """Clear both conversations."""
        self.transcripts = dict.fromkeys(Side, ())


ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow", "raw text": "cyan"}


def conversation_line(speaker: str, text: str, role: str) -> Text:
    """Return one line of a conversation for a terminal, in the colour of the role. `role` is the message's, or `raw text`."""
    return Text.assemble((f"{visible(speaker)}: ", f"bold {ROLE_STYLES[role]}"), (visible(text), ROLE_STYLES[role]))


def speaker_name(role: str, name: str | None) -> str:
    """Return the speaker of a message. `name` is the tool's."""
    return f"{role} ({name})" if name else role


_SIDE_STYLES = {Side.BASE: "yellow", Side.ADAPTER: "green"}


class Columns:
    """Context manager that displays the pieces of two replies.

    On a terminal it redraws after each piece. Elsewhere it prints once, at the end.
    """

    def __init__(self, console: Console, titles: dict[Side, str]) -> None:
        self._console = console
        self._titles = titles
        self._texts = dict.fromkeys(Side, "")
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def append(self, side: Side, piece: str) -> None:
        """Append a piece to the reply of one side."""
        self._texts[side] += piece
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
        elif kind is None:
            self._console.print(self._table())

    def _table(self) -> RenderableType:
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
        for side in Side:
            table.add_column(Text(self._titles[side], style=f"bold {_SIDE_STYLES[side]}"), ratio=1, overflow="fold")
        table.add_row(*(Text(visible(self._texts[side])) for side in Side))
        return table

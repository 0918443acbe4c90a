"""Live display of two replies in two columns."""

from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas.chat.sides import Side
from marlaas_api.last_words import visible

_STYLES = {Side.BASE: "yellow", Side.ADAPTER: "green"}


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

    def hear(self, side: Side, piece: str) -> None:
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
            table.add_column(Text(self._titles[side], style=f"bold {_STYLES[side]}"), ratio=1, overflow="fold")
        table.add_row(*(Text(visible(self._texts[side])) for side in Side))
        return table

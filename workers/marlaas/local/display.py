"""Output of `marlaas run` while jobs run: a live table, plain lines, or JSON objects."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from marlaas.local.report import Report
from marlaas.local.table import (
    COLUMNS,
    COLUMNS_OF_MANY,
    JobView,
    agent_cells,
    as_json,
    cells,
    cells_of_many,
    plain_line,
    token_cells,
    why,
)
from marlaas.local.tenants import GROUPED_FROM, OmittedJobs, Row, TenantView, by_tenant, plain_tenant, rows, share
from marlaas_api.messages import Phase

PLAIN_PERIOD_S = 10.0
MAX_LINES = 6
_SHARE_WIDTH = 24
_COLOURS: Mapping[str, str] = {
    Phase.RUNNING: "cyan",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "red",
    Phase.QUEUED: "yellow",
    Phase.SUSPENDED: "yellow",
}


class Display(Protocol):
    """Display of a run. The runner calls it at every poll; the display itself suppresses repeated output."""

    def waiting(self, text: str, share: float | None = None) -> None:
        """Show what the run waits for. `share` is the completed part, 0 to 1; None if unknown."""
        ...

    def jobs(self, views: Sequence[JobView]) -> None:
        """Show the state of the jobs."""
        ...

    def note(self, text: str) -> None:
        """Print a permanent line."""
        ...

    def result(self, report: Report) -> None:
        """Show the final report."""
        ...

    def refused(self, text: str) -> None:
        """Report the reason why the run could not start or continue. The caller also prints it on stderr."""
        ...

    def close(self) -> None:
        """Restore the terminal. Called before the process exits, in every case."""
        ...


def choose(as_json_lines: bool, out: IO[str] | None = None) -> Display:
    """Return the display for this output: JSON lines, a live table on a terminal, else plain lines."""
    out = out or sys.stdout
    if as_json_lines:
        return JsonDisplay(out)
    if out.isatty() and not os.environ.get("CI"):
        return LiveDisplay(Console(file=out))
    return PlainDisplay(Console(file=out, width=160, color_system=None, soft_wrap=True))


class LiveDisplay:
    """Table that is redrawn in place, below a spinner with the current wait."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", style="cyan")
        self._share: float | None = None
        self._views: Sequence[JobView] = ()
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._draw, transient=True)
        self._live.start()

    def waiting(self, text: str, share: float | None = None) -> None:
        self._spinner.update(text=Text(text, style="dim", overflow="fold"))
        self._share = share

    def jobs(self, views: Sequence[JobView]) -> None:
        self._views = tuple(views)

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def result(self, report: Report) -> None:
        self.close()
        self._console.print(report.rich())

    def refused(self, text: str) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self._spinner]
        if self._share is not None:
            parts.append(ProgressBar(total=1.0, completed=self._share, width=40))
        if self._views:
            # the spinner, the table's header and one line of the shell need room too
            width, height = self._console.size
            parts += [table(self._views, height - 3, width), *failures(self._views)]
        return Group(*parts)


def table(views: Sequence[JobView], room: int, width: int) -> Table:
    """Return the jobs as a Rich table of about `room` rows. Jobs of several agents have a row of each, if there is room for all.

    Many jobs are grouped by tenant, and columns that need more than `width` are left out.
    """
    grid = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    if len(views) >= GROUPED_FROM:
        return _fill_grouped(grid, rows(views, room), [width >= least for least in COLUMNS_OF_MANY.values()])
    for index, column in enumerate(COLUMNS):
        grid.add_column(column, justify="left" if index < 2 else "right", no_wrap=index < 4)
    has_room = len(views) + sum(len(agent_cells(view)) for view in views) <= room
    for view in views:
        grid.add_row(*_coloured(cells(view), view))
        for line in agent_cells(view) if has_room else ():
            grid.add_row(*line, style="dim")
    return grid


def _fill_grouped(grid: Table, found: Sequence[Row], shown: Sequence[bool]) -> Table:
    for index, column in enumerate(compress(COLUMNS_OF_MANY, shown)):
        # the counts of omitted jobs must not make the second column wider
        widest = _SHARE_WIDTH if index == 1 else None
        grid.add_column(column, justify="left" if index < 2 else "right", no_wrap=True, max_width=widest)
    for row in found:
        match row:
            case TenantView():
                speed = f"{row.tokens_per_s:,.0f}"
                line = [
                    row.name,
                    share(row),
                    f"{row.step}/{row.steps}",
                    "",
                    "",
                    speed,
                    *token_cells(row.amounts),
                    "",
                    "",
                ]
                grid.add_row(*compress(line, shown), style="bold")
            case OmittedJobs():
                grid.add_row(f"  … {row.num} more", row.counts, style="dim")
            case JobView():
                name, *rest = _coloured(cells_of_many(row), row)
                grid.add_row(*compress([f"  {name}", *rest], shown))
    return grid


def _coloured(line: Sequence[str], view: JobView) -> list[str | Text]:
    style = _COLOURS.get(view.progress.phase if view.progress else "", "dim")
    name, phase, *rest = line
    return [name, Text(phase, style=style), *rest]


def failures(views: Sequence[JobView]) -> list[Text]:
    """Return the reasons of failed jobs: the end of each message, because a traceback ends with the actual error."""
    failed = [(view.name, view.progress) for view in views if view.progress and view.progress.phase is Phase.FAILED]
    return [Text(why(name, progress.reason, progress.message, MAX_LINES), style="red") for name, progress in failed]


class PlainDisplay:
    """Lines for logs: each new wait, each change of a job's phase, and once per period every running job, or every tenant if there are many jobs."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._waiting = ""
        self._phases: dict[str, str] = {}
        self._printed_at = now()

    def waiting(self, text: str, share: float | None = None) -> None:
        shown = _without_seconds(text)
        if shown != self._waiting:
            self._waiting = shown
            self.note(text)

    def jobs(self, views: Sequence[JobView]) -> None:
        due, many = self._now() - self._printed_at >= PLAIN_PERIOD_S, len(views) >= GROUPED_FROM
        for view in views:
            phase = view.progress.phase if view.progress is not None else ""
            news = phase != self._phases.get(view.name, "")
            if news or (due and not many and phase and not Phase(phase).final):
                self._phases[view.name] = phase
                self.note(plain_line(view))
        if due and many:
            for tenant in by_tenant(views):
                self.note(plain_tenant(tenant))
        if due:
            self._printed_at = self._now()

    def note(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False)

    def result(self, report: Report) -> None:
        self._console.print(report.rich())

    def refused(self, text: str) -> None:
        """Do nothing: the caller prints the text on stderr."""

    def close(self) -> None:
        """Do nothing: plain output needs no cleanup."""


class JsonDisplay:
    """One JSON object per line, with its `type`: `progress` per change of a job, `status`, `note`, `error`, and `summary` at the end."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._waiting = ""
        self._printed: dict[str, object] = {}

    def waiting(self, text: str, share: float | None = None) -> None:
        shown = _without_seconds(text)
        if shown != self._waiting:
            self._waiting = shown
            self._write({"type": "status", "message": text})

    def jobs(self, views: Sequence[JobView]) -> None:
        for view in views:
            if view.name not in self._printed or self._printed[view.name] != view.progress:
                self._printed[view.name] = view.progress
                self._write({"type": "progress", **as_json(view)})

    def note(self, text: str) -> None:
        self._write({"type": "note", "message": text})

    def result(self, report: Report) -> None:
        self._write({"type": "summary", **report.json()})

    def refused(self, text: str) -> None:
        self._write({"type": "error", "message": text})

    def close(self) -> None:
        """Do nothing: JSON output needs no cleanup."""

    def _write(self, content: Mapping[str, object]) -> None:
        print(json.dumps(content, ensure_ascii=False), file=self._out, flush=True)


def _without_seconds(text: str) -> str:
    """Return the text without its durations, so that a wait is printed once."""
    return re.sub(r"\d[\d hms]*[hms]\b", "", text)

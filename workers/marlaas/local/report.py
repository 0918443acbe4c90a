"""Final report of a run: evaluation and replies before and after training, and the paths of the output files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from marlaas.local.results import Exchange, JobResult, exchanges, reason, summary
from marlaas.local.table import faults, number, why, without_signal
from marlaas_api.last_words import visible
from marlaas_api.messages import EvalSample, Phase

MAX_TEXT = 160
MAX_LINES = 40


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all jobs, and their output folder."""

    results: Sequence[JobResult]
    folder: Path

    def json(self) -> dict[str, object]:
        """Return the content of `summary.json` and the path of the output folder."""
        return {**summary(self.results), "out": str(self.folder)}

    def rich(self) -> RenderableType:
        """Return the report for a terminal or plain text."""
        return Group(
            Text(),
            _scores(self.results),
            *_whys(self.results),
            *_idle(self.results),
            *(part for one in self.results for part in self._job(one)),
        )

    def _job(self, result: JobResult) -> Iterator[RenderableType]:
        pairs = exchanges(result)
        yield Text(f"\n{result.document.ref}", style="bold")
        if pairs:
            yield Padding(_replies(pairs), (0, 0, 0, 2))
        for name, path in self.places(result):
            yield Text(f"  {name:<8} {path}")

    def places(self, result: JobResult) -> list[tuple[str, Path]]:
        """Return the job's existing output files, as (name, path)."""
        folder = self.folder / result.document.namespace / result.document.job
        named = [
            ("adapter", folder / "adapter"),
            ("curve", folder / "curve.png"),
            ("record", folder / "steps.jsonl"),
            ("episodes", folder / "episodes.jsonl"),
            ("logs", folder / "logs"),
        ]
        return [(name, path) for name, path in named if path.exists()]


def _scores(results: Sequence[JobResult]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("JOB", "PHASE", "STEPS", "VERSION", "EVAL BEFORE", "AFTER", "FAULTS"):
        table.add_column(column, justify="left" if column in ("JOB", "PHASE") else "right")
    for result in results:
        table.add_row(*_score(result))
    return table


def _score(result: JobResult) -> list[RenderableType]:
    entry = summary([result])["jobs"]
    figures = entry[str(result.document.ref)] if isinstance(entry, dict) else {}
    good = result.phase is Phase.SUCCEEDED
    return [
        str(result.document.ref),
        Text(result.phase.value, style="green" if good else "red"),
        f"{figures['steps']}/{result.document.spec.training.steps}",
        "·" if result.version is None else str(result.version),
        number(figures["evalBefore"]),
        Text(number(figures["evalAfter"]), style="bold"),
        faults(figures["faults"]),
    ]


def _whys(results: Sequence[JobResult]) -> list[Text]:
    unwell = [(str(result.document.ref), reason(result)) for result in results]
    return [
        Text(f"\n{why(name, words['reason'], words['message'], MAX_LINES)}", style="red")
        for name, words in unwell
        if words
    ]


def _idle(results: Sequence[JobResult]) -> Iterator[Text]:
    """Yield a sentence for each job with many steps without signal."""
    for result in results:
        progress = result.progress
        words = without_signal(progress.step, progress.versions.get(result.agent)) if progress is not None else ""
        if words:
            yield Text(
                f"\n{result.document.ref}: {words} `marlaas episodes DIR --best` shows what they were.", style="yellow"
            )


def _replies(pairs: Sequence[Exchange]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("HELD-OUT PROMPT", "BEFORE", "AFTER"):
        table.add_column(column, overflow="fold", ratio=1)
    for pair in pairs:
        table.add_row(Text(_short(pair.before.prompt)), _reply(pair.before), _reply(pair.after))
    return table


def _reply(sample: EvalSample) -> Text:
    return Text(f"{_short(sample.reply) or '(nothing)'} ").append(f"({number(sample.reward)})", style="dim")


def _short(text: str) -> str:
    one_line = visible(" ".join(text.split()))
    return one_line if len(one_line) <= MAX_TEXT else f"{one_line[: MAX_TEXT - 1]}…"

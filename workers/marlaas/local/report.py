"""Final report of a run. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from marlaas.local.idle import AgentActivity, idle
from marlaas.local.results import Exchange, JobResult, agent_scores, exchanges, reason, suite_scores, summary
from marlaas.local.table import faults, number, percent, token_cells, why
from marlaas.local.tenants import GROUPED_FROM, SharesSoFar, phases, tenants_of
from marlaas_api.last_words import error_sentence, visible
from marlaas_api.messages import EvalSample, JobDocument, Phase, Progress, UsageAmounts
from marlaas_api.messages.usage import total

MAX_TEXT = 160
MAX_LINES = 40
MAX_LINES_OF_MANY = 4


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all jobs, their output folder, and the shares of tenants since this runner began; none if it ran nothing."""

    results: Sequence[JobResult]
    folder: Path
    shares: Mapping[str, SharesSoFar] = field(default_factory=dict)

    def json(self) -> dict[str, object]:
        """Return the content of `summary.json` and the path of the output folder."""
        return {**summary(self.results), "out": str(self.folder)}

    def rich(self) -> RenderableType:
        """Return the report for a terminal or plain text. Many jobs are grouped by tenant, without replies and paths of each."""
        if len(self.results) >= GROUPED_FROM:
            failed = [result for result in self.results if result.phase is Phase.FAILED]
            where = Text(
                f"\n{self.folder}/NAMESPACE/JOB/ has each job's adapter, curve.png, records, episodes and logs"
            )
            return Group(
                Text(),
                _grouped(self.results),
                *_tenants(self.results, self.shares),
                *_whys(failed, MAX_LINES_OF_MANY),
                *_noted(self.results),
                *_faulted(self.results),
                *_warned(self.results),
                *_idle(self.results, self.folder),
                where,
            )
        return Group(
            Text(),
            _scores(self.results),
            *_tenants(self.results, self.shares),
            *_whys(self.results),
            *_noted(self.results),
            *_faulted(self.results),
            *_warned(self.results),
            *_idle(self.results, self.folder),
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


def _grouped(results: Sequence[JobResult]) -> Table:
    """Return the scores of each tenant's jobs below the tenant's name."""
    table = _score_columns()
    for tenant in tenants_of(result.document for result in results):
        table.add_row(tenant, style="bold")
        for result in results:
            if result.document.tenant == tenant:
                table.add_row(*_score(result))
                for line in _suite_scores(result):
                    table.add_row(*line, style="dim")
    return table


def _tenants(results: Sequence[JobResult], shares: Mapping[str, SharesSoFar]) -> Iterator[RenderableType]:
    """Yield a table of the tenants if there are several: jobs, steps, use of tokens, and shares of the engines' tokens."""
    names = tenants_of(result.document for result in results)
    if len(names) < 2:
        return
    table = _columns(("TENANT", "JOBS", "STEPS", "TOKENS", "TRAINED", "WASTED", "RECEIVED", "BY WEIGHT"))
    for tenant in names:
        own = [result for result in results if result.document.tenant == tenant]
        found = [result.progress for result in own if result.progress is not None]
        wanted = sum(result.document.spec.training.steps for result in own)
        so_far = shares.get(tenant, SharesSoFar())
        table.add_row(
            tenant,
            phases(result.phase for result in own),
            f"{sum(progress.step for progress in found)}/{wanted}",
            *token_cells(total(progress.amounts for progress in found)),
            percent(so_far.received, so_far.of),
            percent(so_far.entitled, so_far.of),
        )
    yield Padding(table, (1, 0, 0, 0))


def _scores(results: Sequence[JobResult]) -> Table:
    table = _score_columns()
    for result in results:
        table.add_row(*_score(result))
        for line in (*_agent_scores(result), *_suite_scores(result)):
            table.add_row(*line, style="dim")
    return table


def _agent_scores(result: JobResult) -> Iterator[list[str]]:
    """Yield a line for each agent of a job of several."""
    for name, (version, before, after) in agent_scores(result).items():
        yield [f"  {name}", "", "", "·" if version is None else str(version), number(before), number(after), ""]


def _suite_scores(result: JobResult) -> Iterator[list[str]]:
    """Yield a line for each suite of the evaluation; those with several samples have further lines."""
    for name, (before, after) in suite_scores(result).items():
        yield [f"  {name}", "", "", "", number(before), number(after), ""]


def _score_columns() -> Table:
    return _columns(("JOB", "PHASE", "STEPS", "VERSION", "EVAL BEFORE", "AFTER", "FAULTS"))


def _columns(names: Sequence[str]) -> Table:
    """Return an empty table; the first two columns are texts, the others numbers."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right")
    return table


def _score(result: JobResult) -> list[RenderableType]:
    entry = summary([result])["jobs"]
    values = entry[str(result.document.ref)]
    good = result.phase is Phase.SUCCEEDED
    return [
        str(result.document.ref),
        Text(result.phase.value, style="green" if good else "red"),
        f"{values['steps']}/{result.document.spec.training.steps}",
        "·" if result.version is None else str(result.version),
        number(values["evalBefore"]),
        Text(number(values["evalAfter"]), style="bold"),
        faults(values["faults"]),
    ]


def _whys(results: Sequence[JobResult], max_lines: int = MAX_LINES) -> list[Text]:
    failed = [(str(result.document.ref), reason(result)) for result in results]
    return [
        Text(f"\n{why(name, why_not['reason'], why_not['message'], max_lines)}", style="red")
        for name, why_not in failed
        if why_not
    ]


def _noted(results: Sequence[JobResult]) -> Iterator[Text]:
    """Yield for each job what loading its environment left behind."""
    for result in results:
        for note in result.load_notes:
            yield Text(f"\n{result.document.ref}: {visible(note)}", style="yellow")


def _warned(results: Sequence[JobResult]) -> Iterator[Text]:
    """Yield the last warnings of each job."""
    for result in results:
        warnings = result.progress.warnings if result.progress is not None else {}
        for name, text in warnings.items():
            yield Text(f"\n{result.document.ref}: {name}: {text}", style="yellow")


def _faulted(results: Sequence[JobResult]) -> Iterator[Text]:
    """Yield for each job with faults their number and the sentence of the last one."""
    for result in results:
        counted = result.progress.faults if result.progress is not None else {}
        if number_of := sum(counted.values()):
            last = f"; the last one: {_short(said)}" if (said := error_sentence(result.last_fault)) else ""
            what = "1 fault" if number_of == 1 else f"{number_of} faults"
            yield Text(
                f"\n{result.document.ref}: {what} ({faults(counted)}), and no mean contains an episode with a fault{last}",
                style="yellow",
            )


def _idle(results: Sequence[JobResult], folder: Path) -> Iterator[Text]:
    """Yield a sentence for each job with many steps that trained no token, or for each such agent of several."""
    for result in results:
        for sentence in (
            idle(result.progress.step, _activity(result.document, result.progress)) if result.progress else ()
        ):
            yield Text(
                f"\n{result.document.ref}: {sentence} `marlaas episodes {folder}` shows the job's episodes.",
                style="yellow",
            )


def _activity(document: JobDocument, progress: Progress) -> list[AgentActivity]:
    return [
        AgentActivity(
            agent.name,
            progress.versions.get(agent.name),
            agent.trainable,
            _tokens(progress.usage[agent.name]) if agent.name in progress.usage else None,
            progress.agents[agent.name].untrained if agent.name in progress.agents else {},
        )
        for agent in document.spec.policies
    ]


def _tokens(used: UsageAmounts) -> int:
    return used.prompt_tokens + used.generated_tokens


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

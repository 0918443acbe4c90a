"""Command `marlaas usage`: what each tenant and job of a run or a cluster used, in all or within a period, as a table, CSV or JSON."""

import csv
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from marlaas.cli.app import complain
from marlaas.cli.cluster_options import Context, Everywhere, Kubeconfig, Namespace, gateway
from marlaas.cluster.errors import AccessDenied
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.usage import deleted_rows, job_rows
from marlaas.cluster.usage_periods import Period, TenantPeriod, iso, period, period_rows
from marlaas.episodes import files
from marlaas.episodes.usage import UsageRow, sums_by_tenant, usage_of
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.local.table import amount, token_cells
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import UsageAmounts
from marlaas_api.messages.usage import total

Dir = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]", help="Output folder of `marlaas run`, or a job's folder in it. [default: the cluster]"
    ),
]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. [default: all]")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV: one line per job, with every amount.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per job, with every amount.")]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Show what each Tenant used since a date, a date with time (UTC), or an age such as 36h or 7d.",
    ),
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="End of the period of --since. [default: now]")]

_COLUMNS = ("PROMPT", "TOKENS", "TRAINED", "WASTED", "ENGINE", "SLOTS", "TRAINER", "SANDBOX", "KEPT")
_PLAIN_WIDTH = 120


def usage(
    folder: Dir = None,
    job: Job = None,
    as_csv: Csv = False,
    as_json: Json = False,
    since: Since = None,
    until: Until = None,
    everywhere: Everywhere = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what each tenant and job used: of a run on this machine (DIR), or of a cluster.

    In a cluster, the amounts are those of the jobs of the namespace since they were created. With -A they are those of all namespaces, and of the jobs that each
    Tenant has deleted.

    PROMPT counts each turn's whole prompt. TOKENS are the generated ones: TRAINED, WASTED, or those of evaluations, frozen agents and unfinished steps.
    Wasted tokens are those of groups whose members all had the same reward or that were too stale to train, of episodes that ended with a fault or were
    played twice, and of plays that were given up. TOKENS and ENGINE also have those of plays that a preemption of the job cut, which are not charged. ENGINE
    and TRAINER are their seconds of work for the job, SLOTS the seconds for which its adapters had slots of an engine, SANDBOX the seconds that its episodes
    took, and KEPT its adapters and checkpoints. For a run, SLOTS, KEPT and the part of ENGINE for plays that were given up are known only after its
    end. A job of several agents has a line of each policy.

    --since, in a cluster, shows one line per Tenant: its usage within a period, deleted jobs included. The operator keeps each Tenant's total of every hour for
    eight days, then of every day for 400 days; the columns FROM and TO show the times between which was counted.

    --csv and --json have every amount: also cached prompt tokens, wasted tokens by cause, the charged tokens and engine seconds, and the time of admission.

    Exit code: 0 success, 1 the cluster cannot be reached, 2 the folder or job does not exist, or the options exclude each other.
    """
    if as_csv and as_json:
        raise InvalidInput("--csv and --json exclude each other: choose one")
    if until is not None and since is None:
        raise InvalidInput("--until needs --since, the start of the period")
    if since is not None:
        if folder is not None or job is not None or everywhere or namespace:
            raise InvalidInput("--since shows Tenants of a cluster: it takes no DIR, --job, -n or -A")
        _show_period(gateway(context, namespace, kubeconfig), since, until, as_csv, as_json)
        return
    if folder is None:
        rows = _of_cluster(gateway(context, namespace, kubeconfig), job, everywhere)
    elif everywhere or context or namespace or kubeconfig:
        raise InvalidInput("DIR excludes -A, --context, --namespace and --kubeconfig")
    else:
        rows = [_usage(opened) for opened in open_jobs(folder, job)]
    _show(rows, as_csv, as_json)


def _of_cluster(kubectl: Kubectl, job: str | None, everywhere: bool) -> list[UsageRow]:
    """Return the rows of a cluster. Raises InvalidInput if there is no such job."""
    rows = job_rows(kubectl, everywhere=everywhere)
    if job is not None:
        rows = [row for row in rows if row.job == job]
        if not rows:
            raise InvalidInput(f"no RLJob '{job}' {'in the cluster' if everywhere else 'in the namespace'}")
        return rows
    if everywhere:
        try:
            rows += deleted_rows(kubectl)
        except AccessDenied as error:
            complain(f"note: deleted jobs are missing, because Tenants cannot be read: {error}")
    if not rows:
        complain(f"no RLJobs {'in the cluster' if everywhere else 'in the namespace; -A shows all namespaces'}")
    return rows


def _show_period(kubectl: Kubectl, since: str, until: str | None, as_csv: bool, as_json: bool) -> None:
    now = time.time()
    rows: list[TenantPeriod] = []
    for one in period_rows(kubectl, period(since, until, now), now):
        if isinstance(one, str):
            complain(f"note: {one}")
        else:
            rows.append(one)
    lines = [row.as_dict() for row in rows]
    if as_csv:
        typer.echo(_csv(lines, TenantPeriod("", Period(0.0, 0.0), UsageAmounts()).as_dict()), nl=False)
    elif as_json:
        for line in lines:
            typer.echo(json.dumps(line, ensure_ascii=False))
    elif rows:
        _print(_period_table(rows))


def _show(rows: Sequence[UsageRow], as_csv: bool, as_json: bool) -> None:
    if as_csv:
        lines = [row.as_dict() for row in rows]
        typer.echo(_csv(lines, UsageRow("", "", "", UsageAmounts()).as_dict()), nl=False)
    elif as_json:
        for row in rows:
            agents = {"agents": {name: amounts.as_dict() for name, amounts in row.agents.items()}} if row.agents else {}
            typer.echo(json.dumps(row.as_dict() | agents, ensure_ascii=False))
    elif rows:
        _print(_table(rows))


def _usage(opened: OpenedJob) -> UsageRow:
    return usage_of(opened.document, files.read_all(opened.folder), opened.steps(), opened.progress)


def _print(table: Table) -> None:
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    Console(highlight=False, width=width).print(table)


def _csv(lines: Sequence[Mapping[str, str | int | float]], names: Iterable[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _table(rows: Sequence[UsageRow]) -> Table:
    """Return the jobs below their tenant's sum, and the sum of all."""
    table = _empty_table("TENANT / JOB")
    sums = sums_by_tenant(rows)
    for tenant, amounts in sums.items():
        table.add_row(tenant, *_cells(amounts), style="bold")
        for row in rows:
            if row.tenant == tenant:
                name = f"{row.namespace}/{row.job}" if row.job else "deleted jobs"
                table.add_row(f"  {name}", *_cells(row.amounts))
                for agent, own in row.agents.items() if len(row.agents) > 1 else ():
                    table.add_row(f"    {agent}", *_cells(own), style="dim")
    if len(sums) > 1:
        table.add_row("all", *_cells(sum(sums.values(), UsageAmounts())), style="bold")
    return table


def _period_table(rows: Sequence[TenantPeriod]) -> Table:
    table = _empty_table("TENANT", "FROM", "TO")
    for row in rows:
        times = (iso(at)[:16].replace("T", " ") for at in (row.counted.since, row.counted.until))
        table.add_row(row.tenant, *times, *_cells(row.amounts))
    if len(rows) > 1:
        table.add_row("all", "", "", *_cells(total(row.amounts for row in rows)), style="bold")
    return table


def _empty_table(first: str, *times: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in times:
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(amounts: UsageAmounts) -> list[str]:
    seconds = (amounts.engine_s, amounts.slot_s, amounts.trainer_s, amounts.sandbox_s)
    return [
        amount(amounts.prompt_tokens),
        *token_cells(amounts),
        *(f"{number:,.0f}s" if number else "·" for number in seconds),
        f"{amount(amounts.stored_bytes)}B" if amounts.stored_bytes else "·",
    ]

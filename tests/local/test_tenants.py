"""Many jobs on one screen: live table, plain lines and closing report are grouped by tenant and stay short."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from marlaas.local.display import PlainDisplay, table
from marlaas.local.report import Report
from marlaas.local.results import JobResult
from marlaas.local.table import JobView
from marlaas.local.tenants import OmittedJobs, ShareMeter, SharesSoFar, TenantView, bar, by_tenant, plain_tenant, rows
from marlaas_api.messages import Phase, TokenUse, UsageAmounts

USED = UsageAmounts.generated({TokenUse.TRAINED: 60, TokenUse.ZERO_VARIANCE: 10})
PHASES = [Phase.SUCCEEDED, Phase.QUEUED, *[Phase.RUNNING] * 5, Phase.FAILED]


@pytest.fixture
def views(document, progress_of):
    """Eight jobs of each of four tenants with weights 1, 1, 2 and 4; the tokens per second of a running job are 10."""

    def of(tenant, weight, number):
        name = f"job-{number}"
        job = document(name, namespace=tenant, uid=f"{tenant}-{name}", tenant=tenant, tenant_weight=weight)
        speed = 10.0 if PHASES[number] is Phase.RUNNING else 0.0
        done = {"step": number % 3, "tokens_per_s": speed, "tokens": 100, "usage": {"policy": USED}}
        return JobView(job, progress_of(job, phase=PHASES[number], **done))

    return [of(f"team-{at}", weight, number) for at, weight in enumerate((1, 1, 2, 4)) for number in range(8)]


def rendered(renderable, width=140):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def test_shares_are_by_weight_among_tenants_with_running_jobs_and_by_tokens(views):
    tenants = by_tenant(views)
    assert [one.entitled for one in tenants] == pytest.approx([1 / 8, 1 / 8, 2 / 8, 4 / 8])
    assert [one.received for one in tenants] == pytest.approx([1 / 4] * 4)
    idle = [view for view in views if view.document.tenant == "team-3" and view.progress.phase is not Phase.RUNNING]
    without = by_tenant([view for view in views if view.document.tenant != "team-3"] + idle)
    assert [one.entitled for one in without] == [1 / 4, 1 / 4, 2 / 4, None]
    assert {one.entitled for one in by_tenant([replace(view, is_weight_known=False) for view in views])} == {None}


def test_failed_jobs_come_first_and_finished_ones_last(views):
    phases = [view.progress.phase for view in by_tenant(views)[0].jobs]
    assert phases == [Phase.FAILED, *[Phase.RUNNING] * 5, Phase.QUEUED, Phase.SUCCEEDED]


@pytest.mark.parametrize(("room", "num_jobs"), [(100, 32), (36, 32), (35, 24), (24, 16), (12, 4), (2, 4)])
def test_rows_fit_into_the_room_but_every_tenant_shows_a_job(views, room, num_jobs):
    found = rows(views, room)
    assert sum(isinstance(row, JobView) for row in found) == num_jobs
    assert len(found) <= max(room, 12)
    omitted = sum(row.num for row in found if isinstance(row, OmittedJobs))
    assert num_jobs + omitted == len(views)
    assert sum(isinstance(row, TenantView) for row in found) == 4
    assert rows(views[:8], room) == tuple(views[:8]), "few jobs are rows of their own"


def test_the_bar_marks_the_entitled_share(views):
    first, *_, last = by_tenant(views)
    assert bar(first, 8) == "█|······"
    assert bar(last, 8) == "██··|···"


def test_the_live_table_of_many_jobs_has_the_use_of_each_tenant_and_fits_the_terminal(views):
    lines = rendered(table(views, 24, 120), 120)
    assert len(lines) <= 25
    # of eight jobs of 100 tokens: 480 trained, 80 without variance, and the 60 unrecorded ones of the two that have ended
    (told,) = [line.split() for line in lines if line.startswith("team-3 ")]
    assert told[2:] == ["25%", "(50%)", "7/24", "50", "800", "60%", "18%"]
    assert any("… 4 more" in line and "2 running, 1 queued, 1 …" in line for line in lines)


@pytest.mark.parametrize("width", [80, 90, 100, 112, 120])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_number(views, width):
    lines = rendered(table(views, 24, width), width)
    assert len(lines) <= 25
    assert all("TOKENS" in lines[0] and f"{name}" in lines[0] for name in ("TRAINED", "WASTED"))
    assert not any("…" in line for line in lines if "more" not in line)


def test_plain_output_of_many_jobs_has_a_line_for_each_tenant_and_period(views):
    now, out = [0.0], io.StringIO()
    display = PlainDisplay(Console(file=out, width=160, color_system=None), lambda: now[0])
    display.jobs(views)
    before = len(out.getvalue().splitlines())
    now[0] = 10.0
    display.jobs(views)
    lines = out.getvalue().splitlines()[before:]
    assert len(lines) == 4
    assert (
        "team-3: 1 failed, 5 running, 1 queued, 1 succeeded; steps 7/24, 50 tok/s, 25% of all (50% by weight); "
        "tokens 800, trained 60%, wasted 18%" in lines[3]
    )


def test_a_tenant_without_running_jobs_has_no_share(views):
    (tenant,) = by_tenant([view for view in views if view.document.tenant == "team-0"][:2])
    assert (
        plain_tenant(tenant) == "team-0: 1 queued, 1 succeeded; steps 1/6, 0 tok/s; tokens 200, trained 60%, wasted 25%"
    )


def test_shares_so_far_count_tokens_by_the_shares_that_held_while_they_were_generated(views):
    meter = ShareMeter()
    meter.see(views)
    assert meter.sums == {}
    # team-0 generates the next 300 tokens and ends; it was entitled to an eighth of them
    first, ended = [view.document.tenant == "team-0" for view in views], {"phase": Phase.SUCCEEDED}
    more = [300 if view.document.uid == "team-0-job-2" else 0 for view in views]
    meter.see(
        [_later(view, *later, ended if over else {}) for view, *later, over in zip(views, more, first, strict=True)]
    )
    assert meter.sums["team-0"] == SharesSoFar(300, 300 / 8, 300)
    assert meter.sums["team-3"] == SharesSoFar(0, 300 / 2, 300)


@pytest.mark.parametrize("tokens", [0, 100, 100_000])
def test_the_generated_tokens_of_a_tenant_are_those_of_its_usage(views, tokens):
    for tenant in by_tenant([_later(view, tokens - 100, {}) for view in views]):
        assert tenant.generated_tokens == tenant.amounts.generated_tokens >= 8 * tokens


def _later(view, tokens, fields):
    return replace(view, progress=view.progress.model_copy(update={"tokens": 100 + tokens, **fields}))


def test_the_closing_report_of_many_jobs_names_each_once_and_ends_with_the_tenants(views):
    shares = {f"team-{at}": SharesSoFar(25, share, 100) for at, share in enumerate((12.5, 12.5, 25, 50))}
    report = Report([JobResult(view.document, view.progress) for view in views], Path("runs/many"), shares)
    lines = rendered(report.rich())
    assert sum(line.startswith("team-2/job-3 ") for line in lines) == 1
    last = next(line.split() for line in reversed(lines) if line.startswith("team-3 "))
    assert last[-6:] == ["7/24", "800", "60%", "18%", "25%", "50%"]
    assert lines[-1].startswith("runs/many/NAMESPACE/JOB/ has each job's adapter")
    assert len(lines) < 32 + 4 + 8 + 4 * 8


@pytest.mark.parametrize(("names", "is_told"), [({"team-0", "team-1"}, True), ({"team-0"}, False)])
def test_the_report_of_few_jobs_has_the_tenants_if_there_are_several(views, names, is_told):
    few = [view for view in views if view.document.tenant in names and view.document.job == "job-2"]
    report = Report([JobResult(one.document, one.progress) for one in few], Path("runs/few"))
    assert ("BY WEIGHT" in "\n".join(rendered(report.rich()))) is is_told

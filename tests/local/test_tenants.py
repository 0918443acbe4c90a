"""Many jobs on one screen: live table, plain lines and closing report are grouped by tenant and stay short."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from marlaas.local.display import PlainDisplay, table
from marlaas.local.report import JobResult, Report
from marlaas.local.table import JobView
from marlaas.local.tenants import OmittedJobs, TenantView, bar, by_tenant, plain_tenant, rows
from marlaas_api.messages import Phase

PHASES = [Phase.SUCCEEDED, Phase.QUEUED, *[Phase.RUNNING] * 5, Phase.FAILED]


@pytest.fixture
def views(document, progress_of):
    """Eight jobs of each of four tenants with weights 1, 1, 2 and 4; the tokens per second of a running job are 10."""

    def of(tenant, weight, number):
        name = f"job-{number}"
        job = document(name, namespace=tenant, uid=f"{tenant}-{name}", tenant=tenant, tenant_weight=weight)
        speed = 10.0 if PHASES[number] is Phase.RUNNING else 0.0
        return JobView(job, progress_of(job, phase=PHASES[number], step=number % 3, tokens_per_s=speed, tokens=100))

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
    assert [one.entitled for one in without] == pytest.approx([1 / 4, 1 / 4, 2 / 4, 0])


def test_failed_jobs_come_first_and_finished_ones_last(views):
    phases = [view.progress.phase for view in by_tenant(views)[0].jobs]
    assert phases == [Phase.FAILED, *[Phase.RUNNING] * 5, Phase.QUEUED, Phase.SUCCEEDED]


def test_few_jobs_are_rows_of_their_own(views):
    assert rows(views[:8], room=3) == tuple(views[:8])


@pytest.mark.parametrize(("room", "num_jobs"), [(100, 32), (36, 32), (35, 24), (24, 16), (12, 4), (2, 4)])
def test_rows_fit_into_the_room_but_every_tenant_shows_a_job(views, room, num_jobs):
    found = rows(views, room)
    assert sum(isinstance(row, JobView) for row in found) == num_jobs
    assert len(found) <= max(room, 12)
    omitted = sum(row.num for row in found if isinstance(row, OmittedJobs))
    assert num_jobs + omitted == len(views)
    assert sum(isinstance(row, TenantView) for row in found) == 4


def test_the_bar_marks_the_entitled_share(views):
    first, *_, last = by_tenant(views)
    assert bar(first, 8) == "█|······"
    assert bar(last, 8) == "██··|···"


def test_the_live_table_of_many_jobs_fits_the_terminal(views):
    lines = rendered(table(views, 24))
    assert len(lines) <= 25
    assert any(line.startswith("team-3 ") and "25%" in line for line in lines)
    assert any("… 4 more" in line and "2 running, 1 queued, 1 succeeded" in line for line in lines)


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
        "team-3: 1 failed, 5 running, 1 queued, 1 succeeded; steps 7/24, 50 tok/s, 25% of all (50% by weight)"
        in lines[3]
    )


def test_a_tenant_without_running_jobs_has_no_share(views):
    (tenant,) = by_tenant([view for view in views if view.document.tenant == "team-0"][:2])
    assert plain_tenant(tenant) == "team-0: 1 queued, 1 succeeded; steps 1/6, 0 tok/s"


def test_the_closing_report_of_many_jobs_names_each_once_and_says_where_files_are(views):
    report = Report([JobResult(view.document, view.progress) for view in views], Path("runs/many"))
    lines = rendered(report.rich())
    assert sum(line.startswith("team-2/job-3 ") for line in lines) == 1
    assert any(line.startswith("team-2 ") and "25% of tokens" in line for line in lines)
    assert lines[-1].startswith("runs/many/NAMESPACE/JOB/ has each job's adapter")
    assert len(lines) < 32 + 4 + 4 * 8

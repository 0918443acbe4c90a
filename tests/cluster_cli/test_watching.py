"""The live table of jobs in a cluster: what is shown, what is told once, when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.tables import data

from marlaas.cluster.watching import ClusterWatch, headline, view
from marlaas.local.report import Report
from marlaas.local.table import JobView, agent_cells, cells, cells_of_many
from marlaas.local.tenants import by_tenant

SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 8}}


@dataclass
class Screen:
    """A display that remembers."""

    lines: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    shown: list[tuple[JobView, ...]] = field(default_factory=list)

    def waiting(self, text: str, share: float | None = None) -> None:
        self.waited.append(text)

    def jobs(self, views: Sequence[JobView]) -> None:
        self.shown.append(tuple(views))

    def note(self, text: str) -> None:
        self.lines.append(text)

    def result(self, report: Report) -> None:
        raise AssertionError("a watch has no result")

    def refused(self, text: str) -> None:
        raise AssertionError(text)

    def close(self) -> None:
        """Nothing to tidy."""


def _job(name: str = "sums", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "a", "uid": f"u-{name}", "generation": 1}
    kind = {"apiVersion": "marlaas.dev/v1alpha1", "kind": "RLJob"}
    return {**kind, "metadata": metadata, "spec": SPEC, "status": status or None}


def _watch(*looks: Sequence[dict[str, Any]] | Exception) -> tuple[ClusterWatch, Screen]:
    """A watch to which the cluster gives these answers, one a look, ten seconds apart."""
    answers, clock, screen = iter(looks), iter(range(1000, 100_000, 10)), Screen()

    def look() -> Sequence[dict[str, Any]]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ClusterWatch(look, screen, lambda: float(next(clock))), screen


def test_a_row_reads_as_in_a_local_run():
    status = data(__file__, "status_of_a_row")
    agents = [{"name": "a", "policyVersion": 2, "reward": 0.5, "evalBefore": 0.25}, {"name": "b"}]
    team = view(_job(**status | {"agents": agents}), 0.0)
    found = [[cell for cell in line if cell] for line in agent_cells(team)]
    assert found == [["  a", "2", "0.50", "0.25", "0.00"], ["  b", "·", "·", "·", "0.00"]]
    row = ("a/sums", "Running", "3/8", "3", "0.25", "0.10 → 0.20", "1,234", "0.50", "env 2", "·")
    shown = view(_job(**status), 0.0)
    assert cells(shown) == row
    assert cells_of_many(shown)[6:9] == ("200", "45%", "0%")
    [tenant] = by_tenant([shown])
    assert (tenant.name, tenant.entitled) == ("tenant/default", None), "an RLJob does not have its tenant's weight"
    assert cells(view(_job(), 0.0))[:3] == ("a/sums", "Starting", "0/8")


def test_the_headline_says_what_the_first_stuck_job_waits_for():
    queued = {"phase": "Queued", "reason": "WaitingForSlots", "message": "needs 3 adapter slots"}
    bodies = _job(phase="Running", reason="Training"), _job("late", **queued), _job("new")
    views = [view(body, 0.0) for body in bodies]
    assert headline(views) == "1 running, 1 queued, 1 starting · a/late: WaitingForSlots: needs 3 adapter slots"
    assert headline(views[:1]) == "1 running"


def test_a_deleted_job_is_told_once_and_no_longer_shown():
    watch, screen = _watch([_job(phase="Running"), _job("other", phase="Running")], [_job("other")], [])
    watch.run(lambda: None)
    assert screen.lines == ["a/sums was deleted", "a/other was deleted"]
    assert screen.shown[-1] == ()
    assert not watch.failed


def test_a_job_of_a_newer_version_is_told_once_and_disturbs_nobody():
    strange = _job("new", phase="Running")
    strange["spec"] = {**SPEC, "moonPhase": "full"}
    fine = _job(phase="Running", reason="Training")
    failed = _job("other", phase="Failed", reason="TooManyFaults")
    ended = _job(phase="Succeeded", reason="Finished")
    watch, screen = _watch([strange, failed, fine], [strange, failed, ended])
    watch.run(lambda: None)
    assert watch.failed
    told = "a/new cannot be shown, because another version of MARLaaS wrote it"
    assert [line.partition(":")[0] for line in screen.lines] == [told]
    assert [one.name for one in screen.shown[0]] == ["a/sums", "a/other"], "what still runs stands above"

"""Which jobs are handed over to the orchestrator: `quota.queuedJobs`, `requireTenant`, and what counting them costs."""

import pytest
from bench.operator_round import round_seconds
from tests.operator.objects import job, pool, tenant
from tests.operator.real.orchestrators import ADMITTED, SUCCEEDED
from tests.operator.shell.harness import ServiceHarness, in_time, playing, queued_job
from tests.operator.shell.test_service import job_of

from marlaas_operator import observe
from marlaas_operator.cluster import Invalid, Target
from marlaas_operator.cluster.resources import RLJOBS
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic
pytestmark = pytest.mark.usefixtures("monotonic")


async def test_jobs_over_queued_jobs_wait_outside_and_the_oldest_follows_when_one_is_admitted_ends_or_goes():
    harness = ServiceHarness()
    for body in (pool("tiny"), tenant("acme", "team-a", "team-b", quota={"queuedJobs": 2})):
        await harness.cluster.create(body)
    for name in "abcdef":
        await harness.cluster.create(job("team-a", name, "nowhere" if name == "a" else "tiny"))

    def waiting() -> str:
        return "".join(name for name in "abcdef" if harness.status(job_of(name)).get("reason") == "OverQuota")

    async with playing(harness) as orchestrator:
        await harness.until(lambda: waiting() == "def", "b and c queued")
        assert sorted(orchestrator.documents) == ["team-a.b", "team-a.c"], "a waits for its pool and takes no room"
        told = harness.status(job_of("d"))
        assert (told["phase"], told["conditions"][0]["status"]) == ("Queued", "False")
        assert "all 2 places in the queue of Tenant 'acme' (quota.queuedJobs)" in told["message"]
        await orchestrator.say("team-a", "b", **ADMITTED)
        await harness.until(lambda: waiting() == "ef", "d queued")
        await orchestrator.say("team-a", "c", **SUCCEEDED)
        await harness.until(lambda: waiting() == "f", "e queued")
        await harness.cluster.delete(job_of("d"))
        await harness.until(lambda: waiting() == "", "f queued")


async def test_an_installation_may_require_a_tenant():
    harness = ServiceHarness(requireTenant=True)
    await harness.cluster.create(pool("tiny"))
    await harness.cluster.create(job("team-a", "one", "tiny"))
    async with playing(harness) as orchestrator:
        await harness.until(lambda: harness.status().get("reason") == "TenantRequired", "told")
        assert "no Tenant has the namespace 'team-a'" in harness.status()["message"]
        assert not orchestrator.documents
        await harness.cluster.create(tenant("acme", "team-a"))
        await harness.until(lambda: harness.status().get("tenant") == "acme", "queued")


def test_a_round_reads_only_the_jobs_that_changed(monkeypatch):
    """The seconds of 10,000 jobs and 100 Tenants are measured by `bench operator_scale`."""
    read: list[Target] = []
    of = observe.JobLoads._read

    def noted(self: observe.JobLoads, target: Target) -> object:
        read.append(target)
        return of(self, target)

    monkeypatch.setattr(observe.JobLoads, "_read", noted)
    round_seconds(60, 3)
    assert len(read) == 60 + 3
    assert {target.resource for target in read} == {RLJOBS}


async def test_a_job_whose_sandbox_is_refused_says_why_frees_its_slots_and_is_tried_again_ever_later():
    harness = ServiceHarness()

    def refused(verb: str, target: Target) -> Exception | None:
        return Invalid("Secret too long") if (verb, target.name) == ("apply", "one-sandbox") else None

    async with queued_job(harness) as orchestrator:
        harness.cluster.fail = refused
        waits_s: list[float] = []
        for _ in range(3):
            await orchestrator.say("team-a", "one", **ADMITTED)
            await in_time(lambda: orchestrator.documents["team-a.one"].is_held)
            held = orchestrator.documents["team-a.one"].hold
            told = {"reason": held.reason, "message": held.message}
            await orchestrator.say("team-a", "one", phase="Queued", admitted=False, **told)
            await harness.until(lambda: harness.status().get("phase") == "Queued", "held")
            assert (harness.status()["reason"], "Secret too long; its adapter" in harness.status()["message"]) == (
                "PodRefused",
                True,
            )
            began = virtual_time.now()
            await in_time(lambda: not orchestrator.documents["team-a.one"].is_held)
            waits_s.append(round(virtual_time.now() - began, -1))
        assert waits_s == [60, 120, 240]
        harness.cluster.fail = lambda verb, target: None
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("phase") == "Running", "begun")

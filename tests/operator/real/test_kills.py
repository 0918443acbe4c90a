"""kill -9 of the operator after every single action, one after the other: each new operator does exactly one thing more, and nothing twice.

Every place of a pool's and of a job's life, in the order of their plans, so that none is left out.
"""

import pytest
from tests.operator.objects import SYSTEM, job, pool
from tests.operator.real.harness import eventually
from tests.operator.real.orchestrators import ADMITTED, SUCCEEDED, SUSPENDED

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import MODELPOOLS, RLJOBS

ONE, TWO, TINY = Target(RLJOBS, "team-a", "one"), Target(RLJOBS, "team-a", "two"), Target(MODELPOOLS, "", "tiny")
ROLE = ("Apply_NetworkPolicy", "Apply_Service", "Apply_PodDisruptionBudget", "Apply_Secret", "Apply_StatefulSet")
POOL = ("AddFinalizer", "Apply_ServiceAccount", "Apply_ConfigMap", *ROLE, *ROLE)
JOB = ("AddFinalizer", "WriteDocument")
SANDBOX = ("Apply_ServiceAccount", "Apply_NetworkPolicy", "Apply_Secret", "Apply_Deployment")
UNDOING = ("Delete_Deployment", "Delete_Secret", "Delete_NetworkPolicy", "Delete_ServiceAccount")


async def die_after(harness, *actions):
    """Operators one after the other, each killed right after the next of these actions; that it was is asserted."""
    for action in actions:
        marker = harness.folder / f"{len(harness.started)}-{action}"
        operator = harness.start_operator(failpoint=f"operator.reconcile.after_{action}@{marker}")
        await eventually(harness, f"killed after {action}", lambda: not harness.started[-1].alive)
        assert marker.exists(), f"the operator ended by itself before {action}\n{harness.words()}"
        operator.kill()


async def made_once(harness, namespace, number):
    owned = await harness.owned(namespace)
    assert len(owned) == number
    again = [name for name, body in owned.items() if body["metadata"].get("generation", 1) != 1]
    assert again == [], "changed after it was made"


async def told_once(harness):
    told = await harness.events()
    assert len(told) == len(set(told)), told


@pytest.mark.slow
async def test_a_pool_and_its_jobs_live_one_action_an_operator(harness, orchestrator):
    await harness.gateway.create(pool("tiny"))
    await die_after(harness, *POOL, "status")
    await made_once(harness, SYSTEM, 12)
    assert ((await harness.pool("tiny")) or {}).get("status")
    await told_once(harness)

    await a_job_is_begun_suspended_resumed_and_deleted(harness, orchestrator)
    await a_job_that_has_ended_goes_by_its_ttl(harness, orchestrator)

    await harness.gateway.delete(TINY)
    await die_after(harness, "status", "Delete_StatefulSet", "Delete_StatefulSet")
    harness.start_operator()
    await harness.gone(TINY)
    assert await harness.owned(SYSTEM) == {}


async def a_job_is_begun_suspended_resumed_and_deleted(harness, orchestrator):
    await harness.gateway.create(job("team-a", "one", "tiny"))
    await die_after(harness, *JOB, "status")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await die_after(harness, *SANDBOX, "event")
    await made_once(harness, "team-a", 4)
    await told_once(harness)

    await harness.gateway.patch(ONE, {"spec": {"suspend": True}})
    await die_after(harness, "WriteDocument")
    await orchestrator.say("team-a", "one", **SUSPENDED, step=2)
    await die_after(harness, *UNDOING)
    assert await harness.owned("team-a") == {}

    await harness.gateway.patch(ONE, {"spec": {"suspend": False}})
    await die_after(harness, "WriteDocument")
    await orchestrator.say("team-a", "one", **ADMITTED, step=2)
    await die_after(harness, *SANDBOX)
    await made_once(harness, "team-a", 4)
    assert orchestrator.documents["team-a.one"].generation == 3

    orchestrator.forgets = False
    await harness.gateway.delete(ONE)
    await die_after(harness, "WriteDocument", *UNDOING)
    await orchestrator.forget("team-a.one")
    await die_after(harness, "RemoveFinalizer")
    await harness.gone(ONE)
    assert await harness.owned("team-a") == {}
    orchestrator.forgets = True


async def a_job_that_has_ended_goes_by_its_ttl(harness, orchestrator):
    """It had no sandbox whose end would be news: only its own clock calls on it."""
    await harness.gateway.create(job("team-a", "two", "tiny", ttlSecondsAfterFinished=1))
    await die_after(harness, "WriteDocument")
    await orchestrator.say("team-a", "two", **SUCCEEDED)
    await die_after(harness, "DeleteObject", "WriteDocument", "RemoveFinalizer")
    await harness.gone(TWO)
    assert orchestrator.documents == {}

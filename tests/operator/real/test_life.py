"""One life of a job and its pool, under the rights that the chart gives the operator and no others; read by many assertions."""

import asyncio
import os
import signal

import pytest
from tests.operator.objects import SYSTEM, body, job, pool
from tests.operator.real.harness import PATIENCE_S, eventually
from tests.operator.real.orchestrators import ADMITTED, SUCCEEDED
from tests.operator.real.rights import GROUPS, USER, granted, install
from tests.tables import data

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, MODELPOOLS, PODS, RLJOBS, STATEFULSETS

ONE, TINY = Target(RLJOBS, "team-a", "one"), Target(MODELPOOLS, "", "tiny")
WORKLOADS = {
    "sandbox": Target(DEPLOYMENTS, "team-a", "one-sandbox"),
    "rollout": Target(STATEFULSETS, SYSTEM, "tiny-rollout"),
    "trainer": Target(STATEFULSETS, SYSTEM, "tiny-trainer"),
}
SERVES, CRASHES = data(__file__, "serves"), data(__file__, "crashes")
CRASH = ("ContainerCrashing", "Recovered")
TOLD = ["Admitted", *CRASH, *CRASH, "Finished", "Admitted"]
"""The events of the job, but for those of its sandbox's pods."""


@pytest.mark.usefixtures("helm")
async def test_a_job_and_its_pool_live_and_go_by_the_charts_rights_alone(harness, orchestrator):
    install(harness, "default")
    await harness.gateway.create(pool("tiny"))
    await granted(harness, harness.installation.bus_secret)
    process = harness.start_operator(kubeconfig=harness.plane.user_kubeconfig(USER, GROUPS), variant="patient")

    await a_queued_job_owns_nothing_and_costs_one_status(harness, orchestrator)
    await pods_are_made_and_serve(harness)
    for role in ("sandbox", "rollout"):
        await a_crash_is_told_in_the_containers_own_words_and_is_over_when_it_serves(harness, role)
    await more_steps_make_a_finished_job_go_on(harness, orchestrator)
    await eventually(
        harness,
        "every transition is described once, in order",
        lambda: asyncio.to_thread(event_reasons, harness, "rljob", "one", "--namespace", "team-a"),
        accept=lambda found: [reason for reason in found if not reason.startswith("Sandbox")] == TOLD,
    )
    await a_pool_stays_until_its_job_is_gone_and_says_why(harness, orchestrator)

    assert "forbidden" not in process.log.read_text()
    assert harness.metric("marlaas_operator_api_requests_total", status="403") == 0
    assert harness.metric("marlaas_operator_api_requests_total", verb="POST", resource="events", status="201") >= 1


async def a_queued_job_owns_nothing_and_costs_one_status(harness, orchestrator):
    await harness.gateway.create(job("team-a", "one", "tiny", export={"trackers": ["mlflow"]}))
    status = await harness.phase("team-a", "one", "Queued")
    assert (status["reason"], status["progress"]) == ("WaitingForPool", "0/4")
    assert await harness.owned("team-a") == {}
    assert orchestrator.documents["team-a.one"].tenant == "tenant/default"
    counted = {"verb": "PATCH", "resource": "rljobs/status"}
    # Others see it before the operator has its answer.
    number = lambda: harness.metric("marlaas_operator_api_requests_total", **counted)  # noqa: E731
    await eventually(harness, "the status is counted", number, accept=lambda found: found == 1)
    await orchestrator.say("team-a", "one", **ADMITTED)
    await harness.phase("team-a", "one", "Running")
    await harness.owns(4)
    await harness.owns(12, SYSTEM)
    for started_at, num in ((1.0, 8), (None, 4)):  # with an exporter, and without
        await orchestrator.say("team-a", "one", **ADMITTED, started_at=started_at)
        await harness.owns(num)


async def pods_are_made_and_serve(harness):
    """In the place of controllers and kubelet."""
    for role, workload in WORKLOADS.items():
        await harness.gateway.create(pod(await harness.gateway.get(workload), role))
        await report(harness, role, SERVES)
    await says(harness, "Admitted")


async def a_crash_is_told_in_the_containers_own_words_and_is_over_when_it_serves(harness, role):
    await report(harness, role, CRASHES[role])
    status = await says(harness, "ContainerCrashing")
    assert status["phase"] == "Running"
    assert f"{role}-0" in status["message"]
    assert "the rule book of chess is not in this image" in status["message"]
    if role != "sandbox":
        await harness.says("Ready", "the rule book")
    await report(harness, role, SERVES)
    await says(harness, "Admitted")


def pod(workload, role):
    template, place = workload["spec"]["template"], workload["metadata"]["namespace"]
    return body("v1", "Pod", place, f"{role}-0", **template["metadata"]) | {"spec": template["spec"]}


async def report(harness, role, status):
    target = Target(PODS, WORKLOADS[role].namespace, f"{role}-0")
    await harness.gateway.patch(target, {"status": status}, status=True)


async def says(harness, reason):
    """Wait until the job gives this reason; return its status."""
    status = lambda: harness.status("team-a", "one")  # noqa: E731
    return await eventually(harness, f"it says {reason}", status, accept=lambda found: found.get("reason") == reason)


async def more_steps_make_a_finished_job_go_on(harness, orchestrator):
    await orchestrator.say("team-a", "one", **SUCCEEDED)
    await harness.phase("team-a", "one", "Succeeded")
    await harness.gone(WORKLOADS["sandbox"])
    assert "NetworkPolicy one-sandbox" in await harness.owned("team-a"), "its pod still runs"
    await harness.gateway.delete(Target(PODS, "team-a", "sandbox-0"))
    await harness.owns(0)
    await harness.gateway.patch(ONE, {"spec": {"training": {"steps": 9}}})
    documents = orchestrator.documents
    await eventually(harness, "steps are 9", lambda: documents["team-a.one"].spec.training.steps == 9)
    await orchestrator.say("team-a", "one", **ADMITTED, step=4)
    status = await harness.phase("team-a", "one", "Running")
    assert status["progress"] == "4/9"
    assert "finishedAt" not in status
    await harness.owns(4)


def event_reasons(harness, *object_):
    """The reasons of the events, from the top of what `kubectl describe` prints."""
    _, _, table = harness.plane.kubectl("describe", *object_).partition("\nEvents:")
    return [line.split()[1] for line in table.splitlines() if line.split()[:1] in (["Normal"], ["Warning"])]


async def a_pool_stays_until_its_job_is_gone_and_says_why(harness, orchestrator):
    await harness.gateway.delete(TINY)
    await harness.says("InUse", "team-a/one")
    assert "StatefulSet tiny-rollout" in await harness.owned(SYSTEM)
    reasons = lambda: asyncio.to_thread(event_reasons, harness, "modelpool", "tiny")  # noqa: E731
    await eventually(harness, "the pool, in no namespace, has an event", reasons, accept=lambda found: "InUse" in found)
    await harness.gateway.delete(ONE)
    await harness.gone(ONE)
    await harness.owns(0)
    await eventually(harness, "no document is left", lambda: orchestrator.documents == {})
    for role in ("rollout", "trainer"):
        await harness.gateway.delete(Target(PODS, SYSTEM, f"{role}-0"))
    await harness.gone(TINY)
    assert await harness.owned(SYSTEM) == {}


async def test_a_process_of_its_own_serves_drains_on_sigterm_and_is_followed_after_a_kill(harness, orchestrator):
    harness.forks = False
    await harness.queue_job()
    harness.started[-1].kill()
    await orchestrator.say("team-a", "one", **ADMITTED)
    process = harness.start_operator()
    await harness.phase("team-a", "one", "Running")
    await eventually(harness, "ready", lambda: harness.endpoints("/readyz") == "ok\n")
    os.kill(process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert "the operator has drained" in process.last_words()

"""Pods in trouble, as a kubelet would report them to a real API server: the reason and the pod's own words are in the status, and go with their cause."""

import pytest
from tests.operator.objects import SYSTEM, job, pool
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, PODS, STATEFULSETS

WORKLOADS = {
    "sandbox": Target(DEPLOYMENTS, "team-a", "one-sandbox"),
    "rollout": Target(STATEFULSETS, SYSTEM, "tiny-rollout"),
    "trainer": Target(STATEFULSETS, SYSTEM, "tiny-trainer"),
}
WORDS = "2026-11-21T16:00:01.000Z CRITICAL x marlaas_worker: the rule book of chess is not in this image\n"
CRASHED = {"exitCode": 1, "reason": "Error", "message": WORDS}


@pytest.fixture
async def running(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A job at work: each of its workloads has one pod, and each pod serves."""
    await harness.gateway.create(pool("tiny"))
    harness.start_operator()
    await harness.gateway.create(job("team-a", "one", "tiny", backoffLimit=2))
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    for role, workload in WORKLOADS.items():
        await eventually(harness, f"{workload} is there", lambda target=workload: harness.get(target))
        await harness.gateway.create(pod(await harness.gateway.get(workload), role))
        await report(harness, role, serves())
    await reason(harness, "Admitted")
    return harness


def pod(workload: Body, role: str) -> Body:
    """The pod that a controller would make."""
    meta, template = workload["metadata"], workload["spec"]["template"]
    labels = template["metadata"]["labels"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{role}-0", "namespace": meta["namespace"], "labels": labels},
        "spec": template["spec"],
    }


async def report(harness: OperatorHarness, role: str, status: Body) -> None:
    """What a kubelet does."""
    target = Target(PODS, WORKLOADS[role].namespace, f"{role}-0")
    await harness.gateway.patch(target, {"status": status}, status=True)


def serves() -> Body:
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": []}


def back_off(role: str, restarts: int = 1) -> Body:
    """The status of a pod whose main container crashes."""
    state = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": CRASHED}}
    told = {"name": "supervisor" if role == "sandbox" else role, "image": "w:1", "imageID": "", "ready": False}
    conditions = [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}]
    status = {**told, **state, "restartCount": restarts}
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [status]}


async def reason(harness: OperatorHarness, wanted: str) -> Body:
    """The job's status once it gives this reason."""
    found: Body = await eventually(
        harness,
        f"the job says {wanted}",
        lambda: harness.status("team-a", "one"),
        accept=lambda status: status.get("reason") == wanted,
    )
    return found


async def test_a_crash_is_told_in_the_containers_own_words_and_is_over_when_it_serves(running: OperatorHarness) -> None:
    for role in WORKLOADS:
        await report(running, role, back_off(role))
        status = await reason(running, "ContainerCrashing")
        assert status["phase"] == "Running"
        assert f"{role}-0" in status["message"]
        assert "the rule book of chess is not in this image" in status["message"]
        if role != "sandbox":
            await running.says("Ready", "the rule book")
        await report(running, role, serves())
        await reason(running, "Admitted")
    expected = ["RLJob/one ContainerCrashing"] * 3 + ["RLJob/one Recovered"] * 3
    await eventually(
        running,
        "each crash and its end are told once",
        running.events,
        accept=lambda found: [event for event in found if event in expected] == expected,
    )


async def test_a_sandbox_that_crashes_too_often_ends_its_job_with_its_words(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await report(running, "sandbox", back_off("sandbox", restarts=2))
    await reason(running, "ContainerCrashing")
    assert orchestrator.documents["team-a.one"].verdict is None
    await report(running, "sandbox", back_off("sandbox", restarts=3))
    await eventually(
        running, "the orchestrator is told to end it", lambda: orchestrator.documents["team-a.one"].verdict is not None
    )
    verdict = orchestrator.documents["team-a.one"].verdict
    assert verdict is not None
    assert verdict.reason == "BackoffLimitExceeded"
    assert "crashed 3 times, and backoffLimit is 2" in verdict.message
    assert "the rule book of chess is not in this image" in verdict.message

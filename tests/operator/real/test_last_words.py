"""Pods in trouble, as a kubelet would report them to a real API server: the reason and the pod's own words are in the status, and go with their cause."""

import pytest
from tests.operator.real.harness import SYSTEM, OperatorHarness, eventually, job, pool
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
TOO_LARGE = {"exitCode": 137, "reason": "OOMKilled"}


@pytest.fixture
async def running(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A job at work: each of its workloads has one pod, and each pod serves."""
    await harness.gateway.create(pool("tiny"))
    harness.start_operator()
    await harness.gateway.create(job("team-a", "one", "tiny", backoffLimit=2))
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    for role, workload in WORKLOADS.items():

        async def made(workload: Target = workload) -> Body | None:
            return await harness.get(workload)

        await harness.gateway.create(pod(await eventually(harness, f"{workload} is there", made), role))
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


def container(role: str, state: Body, *, before: Body | None = None, restarts: int = 0) -> Body:
    """The status of a pod whose main container is in a state. before: how the container ended the last time."""
    name = "supervisor" if role == "sandbox" else role
    told = {"name": name, "image": "w:1", "imageID": "", "ready": False, "restartCount": restarts, "state": state}
    last = {"terminated": before} if before else {}
    conditions = [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}]
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [{**told, "lastState": last}]}


def back_off(role: str, before: Body, restarts: int = 1) -> Body:
    return container(role, {"waiting": {"reason": "CrashLoopBackOff"}}, before=before, restarts=restarts)


async def reason(harness: OperatorHarness, wanted: str) -> Body:
    """The job's status once it gives this reason."""

    async def told() -> Body | None:
        status = await harness.status("team-a", "one")
        return status if status.get("reason") == wanted else None

    found: Body = await eventually(harness, f"the job says {wanted}", told)
    return found


async def pool_says(harness: OperatorHarness, words: str) -> None:
    async def told() -> bool:
        conditions = ((await harness.pool("tiny")) or {}).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and words in one["message"] for one in conditions)

    await eventually(harness, f"the pool says {words}", told)


async def test_a_crash_is_told_in_the_containers_own_words_and_is_over_when_it_serves(running: OperatorHarness) -> None:
    for role in WORKLOADS:
        await report(running, role, back_off(role, CRASHED))
        status = await reason(running, "ContainerCrashing")
        assert status["phase"] == "Running"
        assert f"{role}-0" in status["message"]
        assert "the rule book of chess is not in this image" in status["message"]
        if role != "sandbox":
            await pool_says(running, "the rule book")
        await report(running, role, serves())
        await reason(running, "Admitted")
    expected = ["RLJob/one ContainerCrashing"] * 3 + ["RLJob/one Recovered"] * 3

    async def told_once() -> bool:
        return [event for event in await running.events() if event in expected] == expected

    await eventually(running, "each crash and its end are told once", told_once)


TROUBLES: list[tuple[Body, tuple[str, str]]] = [
    (
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such host"}}},
        ("ImageCannotBePulled", "no such host"),
    ),
    (
        {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}}},
        ("ConfigMissing", 'secret "key" not found'),
    ),
    (
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "before": TOO_LARGE, "restarts": 1},
        ("ContainerOutOfMemory", "container supervisor exceeded its memory limit"),
    ),
]


async def test_what_ails_a_sandbox_is_its_jobs_reason(running: OperatorHarness) -> None:
    for trouble, (wanted, words) in TROUBLES:
        await report(running, "sandbox", container("sandbox", **trouble))
        assert words in (await reason(running, wanted))["message"]


async def test_a_pod_that_finds_no_node_is_its_jobs_reason_in_the_schedulers_words(running: OperatorHarness) -> None:
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    conditions = [
        {"type": "Ready", "status": "False"},
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words},
    ]
    await report(running, "rollout", {"phase": "Pending", "conditions": conditions})
    assert words in (await reason(running, "PodUnschedulable"))["message"]


async def test_a_sandbox_that_crashes_too_often_ends_its_job_with_its_words(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await report(running, "sandbox", back_off("sandbox", CRASHED, restarts=2))
    await reason(running, "ContainerCrashing")
    assert orchestrator.documents["team-a.one"].verdict is None
    await report(running, "sandbox", back_off("sandbox", CRASHED, restarts=3))

    async def judged() -> bool:
        return orchestrator.documents["team-a.one"].verdict is not None

    await eventually(running, "the orchestrator is told to end it", judged)
    verdict = orchestrator.documents["team-a.one"].verdict
    assert verdict is not None
    assert verdict.reason == "BackoffLimitExceeded"
    assert "crashed 3 times, and backoffLimit is 2" in verdict.message
    assert "the rule book of chess is not in this image" in verdict.message

"""One job's life as the API server sees it, from the apply to the end."""

import asyncio
import os
import signal

from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rig import PATIENCE_S, Rig, eventually, job, pool

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import RLJOBS

SANDBOX = {"Deployment one-sandbox", "NetworkPolicy one-sandbox", "Secret one-sandbox", "ServiceAccount one-sandbox"}


async def test_a_queued_job_owns_nothing_and_costs_one_status(rig: Rig, orchestrator: ScriptedOrchestrator) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator(variant="patient")  # or a late first word costs a status of its own
    await rig.gateway.create(job("team-a", "one", "tiny"))
    status = await rig.phase("team-a", "one", "Queued")
    assert status["reason"] == "WaitingForPool"
    assert status["progress"] == "0/4"
    assert await rig.owned("team-a") == {}

    async def writes() -> float:
        return rig.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status")

    await eventually(rig, "the status is counted", writes)  # others see it before the operator has its answer
    assert await writes() == 1
    assert orchestrator.documents["team-a.one"].tenant == "team-a"


async def test_an_admitted_job_gets_its_sandbox_shows_its_progress_and_gives_the_sandbox_back(
    rig: Rig, orchestrator: ScriptedOrchestrator
) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator()
    await rig.gateway.create(job("team-a", "one", "tiny"))
    await rig.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await rig.phase("team-a", "one", "Running")
    assert set(await rig.owned("team-a")) == SANDBOX
    await orchestrator.say("team-a", "one", **ADMITTED, step=3, reward=0.5, versions={"policy": 3})

    async def at_step_3() -> bool:
        return (await rig.status("team-a", "one")).get("progress") == "3/4"

    await eventually(rig, "step 3 shows", at_step_3)
    over = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}
    await orchestrator.say("team-a", "one", **over)
    assert (await rig.phase("team-a", "one", "Succeeded"))["step"] == 4

    async def nothing_left() -> bool:
        return await rig.owned("team-a") == {}

    await eventually(rig, "the sandbox is gone", nothing_left)


async def test_a_pool_gets_its_workers_and_says_how_many_are_ready(
    rig: Rig, orchestrator: ScriptedOrchestrator
) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator()

    async def told() -> Body | None:
        return ((await rig.pool("tiny")) or {}).get("status")

    status = await eventually(rig, "the pool has a status", told)
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "RolloutReady": "False",
        "TrainerReady": "False",
        "Ready": "False",
    }
    kinds = sorted(name.split()[0] for name in await rig.owned("marlaas-system"))
    assert kinds == sorted(
        [
            "ConfigMap",
            "ServiceAccount",
            *["NetworkPolicy", "PodDisruptionBudget", "Secret", "Service", "StatefulSet"] * 2,
        ]
    )


async def test_a_changed_spec_reaches_the_orchestrator(rig: Rig, orchestrator: ScriptedOrchestrator) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator()
    await rig.gateway.create(job("team-a", "one", "tiny"))
    await rig.phase("team-a", "one", "Queued")
    await rig.gateway.patch(Target(RLJOBS, "team-a", "one"), {"spec": {"priority": 7}})

    async def heard() -> bool:
        return orchestrator.documents["team-a.one"].spec.priority == 7

    await eventually(rig, "the new document", heard)
    assert orchestrator.documents["team-a.one"].generation == 2


async def test_sigterm_drains(rig: Rig) -> None:
    operator = rig.start_operator()

    async def ready() -> bool:
        return rig.endpoints("/readyz") == "ok\n"

    await eventually(rig, "ready", ready)
    os.kill(operator.pid, signal.SIGTERM)
    assert await asyncio.to_thread(operator.wait, PATIENCE_S) == 0
    assert "the operator has drained" in operator.last_words()

"""One job's life as the API server sees it, from the apply to the end."""

import asyncio
import os
import signal

from tests.operator.real.harness import PATIENCE_S, SANDBOX, OperatorHarness, eventually, pool
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import RLJOBS


async def test_a_queued_job_owns_nothing_and_costs_one_status(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    status = await harness.queue_job(variant="patient")  # or a late first word costs a status of its own
    assert status["reason"] == "WaitingForPool"
    assert status["progress"] == "0/4"
    assert await harness.owned("team-a") == {}

    async def writes() -> float:
        return harness.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status")

    await eventually(harness, "the status is counted", writes)  # others see it before the operator has its answer
    assert await writes() == 1
    assert orchestrator.documents["team-a.one"].tenant == "team-a"


async def test_an_admitted_job_gets_its_sandbox_shows_its_progress_and_gives_the_sandbox_back(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator)
    assert set(await harness.owned("team-a")) == SANDBOX
    await orchestrator.say("team-a", "one", **ADMITTED, step=3, reward=0.5, versions={"policy": 3})

    async def at_step_3() -> bool:
        return (await harness.status("team-a", "one")).get("progress") == "3/4"

    await eventually(harness, "step 3 shows", at_step_3)
    over = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}
    await orchestrator.say("team-a", "one", **over)
    assert (await harness.phase("team-a", "one", "Succeeded"))["step"] == 4

    async def nothing_left() -> bool:
        return await harness.owned("team-a") == {}

    await eventually(harness, "the sandbox is gone", nothing_left)


async def test_a_pool_gets_its_workers_and_says_how_many_are_ready(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.gateway.create(pool("tiny"))
    harness.start_operator()

    async def told() -> Body | None:
        return ((await harness.pool("tiny")) or {}).get("status")

    status = await eventually(harness, "the pool has a status", told)
    assert {condition["type"]: condition["status"] for condition in status["conditions"]} == {
        "RolloutReady": "False",
        "TrainerReady": "False",
        "Ready": "False",
    }
    kinds = sorted(name.split()[0] for name in await harness.owned("marlaas-system"))
    assert kinds == sorted(
        [
            "ConfigMap",
            "ServiceAccount",
            *["NetworkPolicy", "PodDisruptionBudget", "Secret", "Service", "StatefulSet"] * 2,
        ]
    )


async def test_a_changed_spec_reaches_the_orchestrator(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.queue_job()
    await harness.gateway.patch(Target(RLJOBS, "team-a", "one"), {"spec": {"priority": 7}})

    async def heard() -> bool:
        return orchestrator.documents["team-a.one"].spec.priority == 7

    await eventually(harness, "the new document", heard)
    assert orchestrator.documents["team-a.one"].generation == 2


async def test_sigterm_drains(harness: OperatorHarness) -> None:
    operator = harness.start_operator()

    async def ready() -> bool:
        return harness.endpoints("/readyz") == "ok\n"

    await eventually(harness, "ready", ready)
    os.kill(operator.pid, signal.SIGTERM)
    assert await asyncio.to_thread(operator.wait, PATIENCE_S) == 0
    assert "the operator has drained" in operator.last_words()

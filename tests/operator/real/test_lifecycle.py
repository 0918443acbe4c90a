"""One job's life as the API server sees it, from the apply to the end."""

import asyncio
import os
import signal

from tests.operator.real.harness import PATIENCE_S, OperatorHarness, eventually
from tests.operator.real.orchestrators import ScriptedOrchestrator


async def test_a_queued_job_owns_nothing_and_costs_one_status(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    status = await harness.queue_job(variant="patient")  # or a late first word costs a status of its own
    assert status["reason"] == "WaitingForPool"
    assert status["progress"] == "0/4"
    assert await harness.owned("team-a") == {}

    counted = {"verb": "PATCH", "resource": "rljobs/status"}
    await eventually(
        harness,
        "the status is counted",  # others see it before the operator has its answer
        lambda: harness.metric("marlaas_operator_api_requests_total", **counted),
        accept=lambda number: number == 1,
    )
    assert orchestrator.documents["team-a.one"].tenant == "namespace/team-a"


async def test_sigterm_drains(harness: OperatorHarness) -> None:
    operator = harness.start_operator()
    await eventually(harness, "ready", lambda: harness.endpoints("/readyz") == "ok\n")
    os.kill(operator.pid, signal.SIGTERM)
    assert await asyncio.to_thread(operator.wait, PATIENCE_S) == 0
    assert "the operator has drained" in operator.last_words()

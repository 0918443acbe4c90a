"""`kubectl describe` of a job shows every transition once, in order."""

import asyncio

from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import MODELPOOLS

SUSPENDED = {"phase": "Suspended", "admitted": False, "reason": "Suspended", "message": "spec.suspend is true"}
QUEUED_AGAIN = {"phase": "Queued", "admitted": False, "reason": "WaitingForSlots", "message": "1 of 8 slots is free"}
SUCCEEDED = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}
TRANSITIONS = [
    (ADMITTED, "Running", "Admitted"),
    (SUSPENDED, "Suspended", "Suspended"),
    (QUEUED_AGAIN, "Queued", "WaitingForSlots"),
    (ADMITTED, "Running", "Admitted"),
    (SUSPENDED, "Suspended", "Suspended"),
    (ADMITTED, "Running", "Admitted"),
    (SUCCEEDED, "Succeeded", "Finished"),
]


def event_reasons(harness: OperatorHarness, *object_: str) -> list[str]:
    """The reasons of the events, from the top of what `kubectl describe` prints."""
    text = harness.plane.kubectl("describe", *(object_ or ("rljob", "one", "--namespace", "team-a")))
    _, _, table = text.partition("\nEvents:")
    return [line.split()[1] for line in table.splitlines() if line.split()[:1] in (["Normal"], ["Warning"])]


async def test_a_job_is_described_in_the_order_of_its_life(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.queue_job()
    for progress, phase, _ in TRANSITIONS:
        await orchestrator.say("team-a", "one", **progress)
        await harness.phase("team-a", "one", phase)
    expected = [event for _, _, event in TRANSITIONS]
    await eventually(
        harness,
        "every transition has its event",
        lambda: asyncio.to_thread(event_reasons, harness),
        accept=lambda found: len(found) >= len(expected),
    )
    assert event_reasons(harness) == expected


async def test_a_pool_is_described_too_though_it_is_in_no_namespace(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator)
    await harness.gateway.delete(Target(MODELPOOLS, "", "tiny"))
    await eventually(
        harness,
        "the pool says that it is in use",
        lambda: asyncio.to_thread(event_reasons, harness, "modelpool", "tiny"),
        accept=lambda found: found == ["InUse"],
    )

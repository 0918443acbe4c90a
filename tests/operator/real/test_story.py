"""`kubectl describe` of a job that has seen much: every transition once, in the order in which it happened."""

import asyncio

from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rig import Rig, eventually, job, pool

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import MODELPOOLS

SUSPENDED = {"phase": "Suspended", "admitted": False, "reason": "Suspended", "message": "spec.suspend is true"}
QUEUED_AGAIN = {"phase": "Queued", "admitted": False, "reason": "WaitingForSlots", "message": "1 of 8 slots is free"}
SUCCEEDED = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}
LIFE = [
    (ADMITTED, "Running", "Admitted"),
    (SUSPENDED, "Suspended", "Suspended"),
    (QUEUED_AGAIN, "Queued", "WaitingForSlots"),
    (ADMITTED, "Running", "Admitted"),
    (SUSPENDED, "Suspended", "Suspended"),
    (ADMITTED, "Running", "Admitted"),
    (SUCCEEDED, "Succeeded", "Finished"),
]


def told(rig: Rig, *words: str) -> list[str]:
    """The reasons of the events, from the top of what `kubectl describe` prints."""
    text = rig.plane.kubectl("describe", *(words or ("rljob", "one", "--namespace", "team-a")))
    _, _, table = text.partition("\nEvents:")
    return [line.split()[1] for line in table.splitlines() if line.split()[:1] in (["Normal"], ["Warning"])]


async def test_a_job_is_described_in_the_order_of_its_life(rig: Rig, orchestrator: ScriptedOrchestrator) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator()
    await rig.gateway.create(job("team-a", "one", "tiny"))
    await rig.phase("team-a", "one", "Queued")
    for words, phase, _ in LIFE:
        await orchestrator.say("team-a", "one", **words)
        await rig.phase("team-a", "one", phase)
    expected = [event for _, _, event in LIFE]

    async def all_told() -> bool:
        return len(await asyncio.to_thread(told, rig)) >= len(expected)

    await eventually(rig, "every transition is told", all_told)
    assert told(rig) == expected


async def test_a_pool_is_described_too_though_it_is_in_no_namespace(
    rig: Rig, orchestrator: ScriptedOrchestrator
) -> None:
    await rig.gateway.create(pool("tiny"))
    rig.start_operator()
    await rig.gateway.create(job("team-a", "one", "tiny"))
    await rig.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await rig.phase("team-a", "one", "Running")
    await rig.gateway.delete(Target(MODELPOOLS, "", "tiny"))

    async def in_use() -> bool:
        return await asyncio.to_thread(told, rig, "modelpool", "tiny") == ["InUse"]

    await eventually(rig, "the pool says that it is in use", in_use)

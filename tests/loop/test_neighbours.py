"""A tenant that fills the engine: what its neighbours' turns wait for is nobody's fault."""

import asyncio

import pytest
from tests.loop.harness import Loop, document

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Phase
from marlaas_worker.rollout.reference_engine import ReferenceEngine

pytestmark = pytest.mark.slow

TURN_TIMEOUT_S = 3.0


def impatient(name: str) -> JobDocument:
    """One step, no second attempt, and a turn may take one second."""
    job = document(name, steps=1)
    fields = job.spec.model_dump(by_alias=True)
    fields["environment"] |= {"turnTimeoutSeconds": TURN_TIMEOUT_S, "maxAttempts": 1}
    fields["evaluation"] |= {"tasks": 0}
    return job.model_copy(update={"spec": type(job.spec).model_validate(fields)})


async def test_a_job_outlasts_a_neighbour_that_fills_the_engine_for_longer_than_a_turn_may_take(
    tiny_model, tmp_path, monkeypatch
):
    flood, modest = document("flood", steps=1), impatient("modest")
    full, gate, generate = asyncio.Event(), asyncio.Event(), ReferenceEngine.generate

    async def held_by_the_flood(self, request, adapter, *arguments):
        if adapter.name.startswith("team-a.flood"):
            full.set()
            await gate.wait()
        return await generate(self, request, adapter, *arguments)

    async def asked(_):
        asyncio.get_running_loop().call_later(2.5 * TURN_TIMEOUT_S, gate.set)

    monkeypatch.setattr(ReferenceEngine, "generate", held_by_the_flood)
    async with Loop(tiny_model, tmp_path, maxNumSeqs=1) as loop:
        await loop.submit(flood)
        await full.wait()
        async with loop.bus.listen(subjects.generation("team-a", "modest", "policy"), asked):
            await loop.submit(modest)
            levels = await asyncio.gather(loop.finished(modest), loop.finished(flood))
    assert [(level.phase, level.reason, level.faults) for level in levels] == [(Phase.SUCCEEDED, "Finished", {})] * 2

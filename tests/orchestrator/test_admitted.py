"""Admitted is admitted: no edit, restart, error of ours or smaller pool displaces a running job; what replicas cannot do now is waited for."""

import asyncio
from typing import Any

import pytest
from tests.harness import changed
from tests.orchestrator.harness import OrchestratorHarness

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Phase

WHOLE_POOL = 6
"""maxStaleness of a job whose versions fill all 8 slots."""


def of(document: JobDocument, namespace: str) -> JobDocument:
    """The same job in another namespace, which is a tenant by itself."""
    return document.model_copy(update={"namespace": namespace, "tenant": namespace, "uid": f"uid-{namespace}"})


def loop(document: JobDocument) -> asyncio.Task[Any]:
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == f"job {document.ref}"]
    return task


@pytest.fixture
async def rivals(harness: OrchestratorHarness, document: Any) -> tuple[JobDocument, JobDocument]:
    """Two jobs that need the whole pool: the second is queued while the first runs, and stands before it in every alphabet."""
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    first = of(document("sums", maxStaleness=WHOLE_POOL), "team-z")
    return first, of(document("sums", maxStaleness=WHOLE_POOL, priority=9), "team-a")


async def one_runs(harness: OrchestratorHarness, first: JobDocument, second: JobDocument) -> None:
    await harness.submit(first)
    await harness.progress(first, lambda level: level.admitted)
    await harness.submit(second)
    await harness.progress(second, lambda level: level.reason == "WaitingForMemory")


@pytest.mark.parametrize("part", ["ttl_seconds_after_finished", "priority", "steps"])
async def test_an_edit_that_does_not_concern_the_loop_neither_displaces_nor_restarts_it(harness, rivals, part):
    first, second = rivals
    more_steps = {"training": first.spec.training.model_copy(update={"steps": 9})}
    async with harness.orchestrating():
        await one_runs(harness, first, second)
        before = loop(first)
        await harness.submit(changed(first, **(more_steps if part == "steps" else {part: 60})))
        level = await harness.progress(first, lambda level: level.generation == 2)
        assert (level.admitted, level.steps) == (True, 9 if part == "steps" else 3)
        assert (loop(first) is before) is (part != "steps")


@pytest.mark.parametrize("slots", [8, 4], ids=["as before", "fewer slots than it holds"])
async def test_a_restart_of_the_orchestrator_displaces_nobody(harness, rivals, slots):
    first, second = rivals
    async with harness.orchestrating("one"):
        await one_runs(harness, first, second)
    await harness.put_report(slots=slots, max_rank=16, kv_tokens=1)
    third = of(first, "team-0")
    async with harness.orchestrating("two"):
        await harness.submit(third)
        assert not (await harness.progress(third, lambda level: True)).admitted, "the new one has decided"
        assert (await harness.progress(first, lambda level: True)).admitted
        assert not (await harness.progress(second, lambda level: True)).admitted


async def test_a_job_whose_document_cannot_be_read_any_more_runs_on_and_keeps_its_slots(harness, rivals):
    first, second = rivals
    async with harness.orchestrating():
        await one_runs(harness, first, second)
        before = loop(first)
        await (await harness.bus.bucket(subjects.JOBS)).put(first.ref.key, b"of a later release")
        third = of(first, "team-0")
        await harness.submit(third)
        assert not (await harness.progress(third, lambda level: True)).admitted
        assert loop(first) is before
    assert not (await harness.progress(second, lambda level: True)).admitted


async def test_what_only_the_replicas_of_before_a_pools_change_cannot_do_is_waited_for(harness, document):
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    await harness.put_report(replica="rollout-1", slots=16, max_rank=64, kv_tokens=1)
    waiting = document(rank=32)
    async with harness.orchestrating():
        await harness.submit(waiting)
        level = await harness.progress(waiting, lambda level: True)
        assert (level.phase, level.reason) == (Phase.QUEUED, "WaitingForPool")
        assert "rank 32" in level.message
        await harness.put_report(slots=16, max_rank=64, kv_tokens=1)
        assert (await harness.progress(waiting, lambda level: level.phase is not Phase.QUEUED)).admitted

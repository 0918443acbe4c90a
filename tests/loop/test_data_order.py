"""Tasks that come again and tasks that rest, with every role real: killed anywhere, the same adapter from the same tasks."""

import asyncio

import pytest
from tests.loop.harness import document, run

pytestmark = pytest.mark.slow

DATA = {"tasks": 4, "order": "shuffled", "skip": {"passes": 1, "maxShare": 0.6}}


def job():
    return document("again", environment="calculator", steps=4, maxRefill=1, data=DATA)


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    """What a run gives when nothing happens to it."""
    return asyncio.run(run(tiny_model, tmp_path_factory.mktemp("undisturbed"), job()))


def said(steps):
    return [(step.outcome, step.indices, step.outcomes, step.skipped_solved, step.skipped_hopeless) for step in steps]


def test_tasks_came_again_and_some_rested(undisturbed):
    _, steps, _ = undisturbed
    played = [one.index for step in steps for one in step.outcomes]
    assert len(played) > len(set(played))
    assert set(played) <= set(range(4))
    assert sum(step.skipped_solved + step.skipped_hopeless for step in steps) > 0


@pytest.mark.parametrize(
    "seam",
    [
        "orchestrator.issue.after_ledger",
        "orchestrator.issue.after_task",
        "orchestrator.assign.after_log",
        "orchestrator.record.after_step",
        "trainer.commit.after_set",
        "sandbox.task.before_ack",
    ],
)
async def test_killed_three_times_at_a_seam_it_is_the_same_adapter_from_the_same_tasks(
    tiny_model, tmp_path, undisturbed, seam
):
    weights, steps, deaths = await run(tiny_model, tmp_path, job(), seam, 1, 2, 3)
    assert deaths == [seam] * 3
    assert weights == undisturbed[0]
    assert said(steps) == said(undisturbed[1])

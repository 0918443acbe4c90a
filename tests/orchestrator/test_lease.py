"""The leader lease: given back at a stop, and a sign that another orchestrator leads makes this one read everything again."""

import pytest
from tests.harness import a_progress, identity
from tests.orchestrator.harness import final, mixed, running

from marlaas_api import subjects
from marlaas_api.messages import Phase, StepClosed
from marlaas_api.wire import encode
from marlaas_worker.orchestrator.lease import KEY, LeaderLease


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_lease_is_given_back_unless_another_replica_has_taken_it(harness, is_taken):
    held, bucket = LeaderLease(await harness.context("orchestrator-0")), await harness.bus.bucket(subjects.REPLICAS)
    assert await held.hold()
    if is_taken:
        await bucket.delete(KEY)
        assert await LeaderLease(await harness.context("orchestrator-1")).hold()
    else:
        await bucket.put(KEY, (await bucket.get(KEY)).data)  # its last renewal was not answered
    await held.release()
    assert await LeaderLease(await harness.context("orchestrator-2")).hold() is not is_taken


@pytest.mark.parametrize("written", ["bucket progress", "subject group.team-a.sums"])
async def test_an_orchestrator_that_finds_anothers_writes_reads_everything_again(harness, document, caplog, written):
    job = document(steps=3)
    harness.pause_after = 1
    async with running(harness, job, mixed):
        before = await harness.progress(job, lambda level: level.step == 1)
        if written == "bucket progress":
            ran = {"step": before.step, "started_at": before.started_at, "admitted_s": 77.0}
            await harness.put(subjects.PROGRESS, job.ref.key, a_progress(job, phase=Phase.RUNNING, **ran))
        else:
            closed = StepClosed(**identity(job) | {"uid": "uid-other"}, step=9, parts=())
            await harness.bus.publish(subjects.job_log("team-a", job.job), encode(closed))
        harness.may_train.set()
        level = await harness.progress(job, final)
    assert (level.phase, level.step, harness.deaths) == (Phase.SUCCEEDED, 3, [])
    assert "another process has written to the" in caplog.text
    assert f"the {written}; reading everything again" in caplog.text
    assert written != "bucket progress" or level.admitted_s >= 77.0, "it goes on from what it has read"

"""The leader lease: given back at a stop, and a sign that another orchestrator leads makes this one read everything again."""

import pytest
from tests.harness import a_progress
from tests.orchestrator.harness import OrchestratorHarness, final, mixed, running

from marlaas_api import subjects
from marlaas_api.messages import Phase
from marlaas_api.wire import encode
from marlaas_worker.orchestrator import lease, service
from marlaas_worker.orchestrator.lease import KEY, LeaderLease


async def test_a_lease_whose_last_renewal_was_not_answered_is_given_back(harness: OrchestratorHarness) -> None:
    held, bucket = LeaderLease(await harness.context("orchestrator-0")), await harness.bus.bucket(subjects.REPLICAS)
    assert await held.hold()
    entry = await bucket.get(KEY)
    await bucket.put(KEY, entry.data)
    await held.release()
    assert await LeaderLease(await harness.context("orchestrator-1")).hold()


async def test_a_lease_that_another_replica_has_taken_stays_its_own(harness: OrchestratorHarness) -> None:
    held, bucket = LeaderLease(await harness.context("orchestrator-0")), await harness.bus.bucket(subjects.REPLICAS)
    assert await held.hold()
    await bucket.delete(KEY)
    assert await LeaderLease(await harness.context("orchestrator-1")).hold()
    await held.release()
    assert not await LeaderLease(await harness.context("orchestrator-2")).hold()


async def test_an_orchestrator_that_finds_another_ones_progress_reads_everything_again_and_goes_on(
    harness: OrchestratorHarness, document, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (lease, service):
        monkeypatch.setattr(module, "RENEW_S", 0.05)
    job = document(steps=3)
    harness.pause_after = 1
    async with running(harness, job, mixed):
        before = await harness.progress(job, lambda level: level.step == 1)
        foreign = a_progress(job, phase=Phase.RUNNING, step=before.step, started_at=before.started_at, admitted_s=77.0)
        await (await harness.bus.bucket(subjects.PROGRESS)).put(job.ref.key, encode(foreign))
        harness.may_train.set()
        level = await harness.progress(job, final)
    assert (level.phase, level.step, harness.deaths) == (Phase.SUCCEEDED, 3, [])
    assert "another orchestrator has written to the bucket progress; reading everything again" in caplog.text
    assert level.admitted_s >= 77.0, "it goes on from what it has read"

"""A store that refuses, is full or says nothing: the trainer waits with the reason, and then makes the same bits."""

import pytest
from tests.tables import rows
from tests.trainer.harness import job

from marlaas_api import blobs, subjects
from marlaas_api.blobs import BlobCorrupt
from marlaas_api.reasons import Reason

UID = "uid-sums"


@pytest.fixture(scope="module")
def undisturbed(apart):
    return apart(lambda harness: harness.trained(job(), steps=2))


@pytest.mark.parametrize(("kind", "words", "reason"), rows(__file__, "store_faults"))
async def test_ten_minutes_without_the_store_change_no_bit(harness, undisturbed, kind, words, reason):
    document = job()
    async with harness.training(document):
        await harness.play(document, 1)
        num_groups = document.spec.training.groups_per_step
        await harness.assign(document, 1, range(num_groups))
        harness.blobs.failure = getattr(blobs, kind)(words)
        await harness.close(document, 1, num_groups)
        since = (await harness.report(lambda report: UID in report.waits)).waits[UID].since
        for _ in range(20):
            harness.clock.at += 30
            found = await harness.report(lambda report: UID in report.waits and report.at == harness.clock.at)
            assert (found.waits[UID].reason, found.broken, found.waits[UID].since) == (reason, {}, since)
        harness.blobs.failure = None
        await harness.version(document, 2)
        await harness.report(lambda report: not report.waits)
    assert await harness.adapter(document) == undisturbed[0]


async def test_wrong_bytes_still_fail_the_job_at_once(harness):
    document = job()
    async with harness.training(document):
        pass
    harness.blobs.failure = BlobCorrupt("other bytes")
    async with harness.trainer():
        await harness.report(lambda report: bool(report.broken))


@pytest.mark.parametrize("where", ["policy", "groups", "document"])
async def test_what_cannot_be_read_is_waited_for_with_its_place_and_nothing_is_let_go(harness, where):
    document, newer = job(), b"\x83\xa1v\x63\xa1t\xa1X\xa1d\x80"
    async with harness.training(document):
        jobs, policies = await harness.bus.bucket(subjects.JOBS), await harness.bus.bucket(subjects.POLICY)
        if where == "document":
            await jobs.put(document.ref.key, newer)
            await harness.play(document, 1)
            return
        record = await harness.record(document)
        if where == "policy":
            await policies.put(harness.policy_key(document), newer)
        else:
            await harness.bus.publish(subjects.group(document.namespace, document.job, "policy"), newer)
        found = await harness.report(lambda report: UID in report.waits)
        wait = found.waits[UID]
        assert (wait.reason, found.broken) == (Reason.UNREADABLE, {})
        assert ("key team-a.sums.policy" if where == "policy" else "group.team-a.sums.policy") in wait.message
        assert "schema version 99" in wait.message
    assert record.manifest is not None
    assert record.manifest.name in harness.blobs.contents

"""The bind and the commit, cut short between any two effects and fenced by the lease; and a store that refuses, is full or says nothing."""

import asyncio
from functools import partial
from typing import Any

import pytest
from tests.harness import WITHIN_S, changed
from tests.killing import Killed, kill_at
from tests.tables import rows
from tests.trainer.harness import assignment_of, job

from marlaas_api import blobs, failpoints, subjects, wire
from marlaas_api.blobs import BlobCorrupt, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import Phase, PolicyRecord
from marlaas_api.names import job_prefix
from marlaas_api.reasons import Reason
from marlaas_worker.trainer.assignment import LEASE_GRACE_S
from marlaas_worker.trainer.optimizer import FILENAME
from marlaas_worker.trainer.versions import AgentLease, PolicyKey, StepResult, VersionContents
from marlaas_worker.trainer.view import PolicyEntry

STEPS = 3
EFFECTS = ["before_blobs", "after_blobs", "after_manifest", "after_set"]
PLACES = [
    ("trainer.bind.after_set", 1),
    *((f"trainer.commit.{effect}", passes) for effect in EFFECTS for passes in (1, 2)),
    ("trainer.commit.after_acks", 1),
]


async def play(harness, **training: Any):
    document = job(**training)
    await harness.trained(document, steps=STEPS)
    return [
        (made.version, made.step, made.consumed, made.files["adapter_model.safetensors"].sha256)
        for made in reversed(await harness.history(document))
    ]


async def until_only_versions_are_stored(harness, document):
    expected, contents = (await harness.record(document)).stored_bytes, harness.blobs.contents
    await harness.admit(document, phase=Phase.SUCCEEDED)
    async with harness.trainer("trainer-1"):
        ours = job_prefix(document.ref)
        await harness.until(lambda: sum(len(contents[name]) for name in contents if name.startswith(ours)) == expected)


@pytest.fixture(scope="module")
def undisturbed(apart):
    return apart(play)


@pytest.mark.parametrize(("place", "passes"), PLACES)
async def test_killed_between_any_two_effects_a_trainer_makes_the_same_versions(harness, undisturbed, place, passes):
    passed = kill_at(place, passes)
    assert await play(harness) == undisturbed
    assert passed.count(place) >= passes
    await until_only_versions_are_stored(harness, job())


@pytest.mark.parametrize("keep", [1, 2, 9])
async def test_the_record_counts_exactly_the_bytes_that_all_versions_and_the_kept_states_take(harness, keep):
    document, contents = job(), harness.blobs.contents
    document = changed(document, checkpoint=document.spec.checkpoint.model_copy(update={"keep": keep}))
    async with harness.training(document):
        await harness.play(document, STEPS)
        num_states = min(keep, STEPS + 1)  # the last one is deleted after the commit
        await harness.until(lambda: sum(name.endswith(FILENAME) for name in contents) <= num_states)
    record, newest = await harness.record(document), (await harness.history(document))[0]
    assert (record.version, len(record.state_bytes)) == (STEPS, num_states)
    assert newest.state.name in contents
    ours = [data for name, data in contents.items() if name.startswith(job_prefix(document.ref))]
    assert record.stored_bytes == sum(map(len, ours))


async def test_a_trainer_that_has_lost_its_lease_deletes_nothing_of_later_versions(harness):
    document = job()
    await harness.trained(document, steps=1)
    late = await harness.record(document)
    before, policy = dict(harness.blobs.contents), await policy_key(harness, "late")
    await policy.tidy(late.model_copy(update={"version": 0, "manifest": (await harness.history(document))[0].parent}))
    assert harness.blobs.contents == before


@pytest.mark.slow
async def test_killed_at_every_single_place_in_turn_a_trainer_still_gets_there(harness, apart):
    several = {"updatesPerStep": 2, "epochs": 2}
    undisturbed = await asyncio.to_thread(apart, partial(play, **several))
    seen: set[tuple[str, int]] = set()

    def hook(name):
        # a repeated commit writes another manifest of its version, because it has other seconds
        versions = len({kept.rpartition("/")[0] for kept in harness.blobs.contents if kept.endswith("-manifest")})
        if (name, versions) not in seen:
            seen.add((name, versions))
            raise Killed

    failpoints.hook = hook
    assert await play(harness, **several) == undisturbed
    assert {name for name, _ in seen} == {name for name, _ in PLACES} - {"trainer.commit.after_acks"}  # died before


async def test_a_trainer_takes_over_once_the_holder_has_been_silent_for_long_enough(harness, undisturbed, caplog):
    document = job()
    await harness.admit(document)
    async with asyncio.timeout(WITHIN_S):
        context = await harness.context("trainer-0")
        first = asyncio.create_task(harness.serve(context))
        await harness.play(document, 1)
        failpoints.hook = lambda name: (_ for _ in ()).throw(Killed)
        await harness.step(document, 1)
        await asyncio.wait([first])
        assert isinstance(first.exception(), BaseExceptionGroup)
        await context.bus.close()
        failpoints.hook = None
        async with harness.trainer("trainer-1"):
            await looked(harness)
            assert (await harness.record(document)).holder == "trainer-0"  # its report has not expired yet
            pass_time(harness, subjects.REPLICA_TTL_S + 1)
            await looked(harness)
            assert (await harness.record(document)).holder == "trainer-0"  # an outage would look the same
            harness.server.available = False
            await harness.until(lambda: "no agent is bound or released" in caplog.text)
            pass_time(harness, LEASE_GRACE_S)
            harness.server.available = True
            await looked(harness)
            assert (await harness.record(document)).holder == "trainer-0"  # nobody has seen it absent meanwhile
            pass_time(harness, LEASE_GRACE_S)
            taken = await harness.committed(document, lambda record: record.holder == "trainer-1")
            await harness.version(document, 2)
            await harness.play(document, 1, first=2)
    assert taken.epoch == 1
    assert [made.version for made in await harness.history(document)] == [3, 2, 1, 0]
    assert (await harness.history(document))[0].files["adapter_model.safetensors"].sha256 == undisturbed[-1][3]


def pass_time(harness, seconds):
    harness.clock.at += seconds
    harness.server.wake()


async def looked(harness):
    """Wait until trainer-1 has reported, and so looked around, a few times since the clock was moved."""
    now = iter(range(5))
    await harness.report(lambda report: report.at == harness.clock.at and next(now) == 4, "trainer-1")


async def policy_key(harness, name):
    bucket = await harness.bus.bucket(subjects.POLICY)
    return PolicyKey(await harness.context(name), bucket, assignment_of(job()), 0.001)


def version(number):
    result = StepResult(number, number - 1, (f"uid-sums-t{number}",), {"loss": 0.5})
    files = {"adapter_model.safetensors": b"tensors"}
    return VersionContents(result, 8, files, b"state", {"float32": "digest"}, (), 1e-3)


async def test_the_commit_of_a_trainer_that_lost_its_lease_is_refused_and_changes_nothing(harness):
    bucket = await harness.bus.bucket(subjects.POLICY)
    first, second = [await policy_key(harness, name) for name in ("trainer-0", "trainer-1")]
    lease = await first.commit(await first.bind(None), version(0))
    newer = await second.bind(PolicyEntry(await bucket.get(assignment_of(job()).policy_key), None))
    with pytest.raises(Overtaken, match="the bucket policy"):
        await first.commit(lease, version(1))
    assert await harness.record(job()) == newer.record
    assert (newer.record.epoch, newer.record.version, newer.record.holder) == (1, 0, "trainer-1")
    committed = await second.commit(newer, version(1))
    assert await harness.record(job()) == committed.record


async def test_of_two_trainers_that_bind_at_once_one_gets_the_agent(harness):
    binds = [(await policy_key(harness, name)).bind(None) for name in ("trainer-0", "trainer-1")]
    outcomes = await asyncio.gather(*binds, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {AgentLease, Overtaken}
    assert (await harness.record(job())).holder == ("trainer-0" if isinstance(outcomes[0], AgentLease) else "trainer-1")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_set_whose_answer_is_lost_happens_once(harness, monkeypatch, lost):
    policy = await policy_key(harness, "trainer-0")
    bound, update, left = await policy.bind(None), MemoryBucket.update, [BusUnavailable("lost")] * 2

    async def faulty(*args, **named):
        written = None if left and lost == "request" else await update(*args, **named)
        if left:
            raise left.pop()
        return written

    monkeypatch.setattr(MemoryBucket, "update", faulty)
    lease = await policy.commit(bound, version(0))
    entry = await (await harness.bus.bucket(subjects.POLICY)).get(assignment_of(job()).policy_key)
    assert (lease.revision, left) == (entry.revision, [])
    assert wire.decode_as(PolicyRecord, entry.data or b"") == lease.record
    assert (await policy.commit(lease, version(1))).record.version == 1


async def test_a_full_disk_is_waited_for_and_the_version_is_whole(harness, monkeypatch):
    policy, put, left = await policy_key(harness, "trainer-0"), MemoryBlobs.put, [BlobUnavailable("no space left")] * 5

    async def full(*args):
        if left:
            raise left.pop()
        return await put(*args)

    monkeypatch.setattr(MemoryBlobs, "put", full)
    lease = await policy.commit(await policy.bind(None), version(0))
    assert (left, bool(await harness.blobs.get(lease.record.manifest))) == ([], True)


UID = "uid-sums"


@pytest.fixture(scope="module")
def two_steps(apart):
    return apart(lambda harness: harness.trained(job(), steps=2))


@pytest.mark.parametrize(("kind", "words", "reason"), rows(__file__, "store_faults"))
async def test_ten_minutes_without_the_store_change_no_bit(harness, two_steps, kind, words, reason):
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
    assert await harness.adapter(document) == two_steps[0]


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
            await harness.bus.publish(subjects.job_log(document.namespace, document.job), newer)
        found = await harness.report(lambda report: UID in report.waits)
        wait = found.waits[UID]
        assert (wait.reason, found.broken) == (Reason.UNREADABLE, {})
        assert ("key team-a.sums.policy" if where == "policy" else "group.team-a.sums") in wait.message
        assert "schema version 99" in wait.message
    assert record.manifest is not None
    assert record.manifest.name in harness.blobs.contents

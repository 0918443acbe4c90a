"""The leader lease: given back at a stop, and a sign that another orchestrator leads makes this one read everything again."""

import re
from collections.abc import Awaitable, Callable

import pytest
from tests.harness import a_progress, identity
from tests.orchestrator.harness import final, mixed, running

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.messages import Phase, StepClosed
from marlaas_api.wire import encode
from marlaas_worker.orchestrator.fenced_bucket import FencedBucket
from marlaas_worker.orchestrator.lease import KEY, LeaderLease, LostLease

JOB_KEY = "team-a.sums"


async def test_a_lease_whose_last_renewal_was_not_answered_is_given_back(harness):
    held, bucket = LeaderLease(await harness.context("orchestrator-0")), await harness.bus.bucket(subjects.REPLICAS)
    assert await held.hold()
    entry = await bucket.get(KEY)
    await bucket.put(KEY, entry.data)
    await held.release()
    assert await LeaderLease(await harness.context("orchestrator-1")).hold()


async def test_a_lease_that_another_replica_has_taken_stays_its_own(harness):
    held, bucket = LeaderLease(await harness.context("orchestrator-0")), await harness.bus.bucket(subjects.REPLICAS)
    assert await held.hold()
    await bucket.delete(KEY)
    assert await LeaderLease(await harness.context("orchestrator-1")).hold()
    await held.release()
    assert not await LeaderLease(await harness.context("orchestrator-2")).hold()


@pytest.mark.parametrize("written", ["bucket progress", "GROUPS log", "ledger"])
async def test_an_orchestrator_that_finds_anothers_writes_reads_everything_again(harness, document, caplog, written):
    job = document(steps=3)
    harness.pause_after = 1
    async with running(harness, job, mixed):
        before = await harness.progress(job, lambda level: level.step == 1)
        if written == "bucket progress":
            ran = {"step": before.step, "started_at": before.started_at, "admitted_s": 77.0}
            await harness.put(subjects.PROGRESS, job.ref.key, a_progress(job, phase=Phase.RUNNING, **ran))
        elif written == "GROUPS log":
            names = identity(job) | {"uid": "uid-other", "agent": "policy"}
            closed = StepClosed(**names, step=9, base_version=9, num_groups=0)
            await harness.bus.publish(subjects.group("team-a", job.job, "policy"), encode(closed))
        else:
            bucket = await harness.bus.bucket(subjects.LEDGER)
            await bucket.put(job.ref.key, (await bucket.get(job.ref.key)).data)
        harness.may_train.set()
        level = await harness.progress(job, final)
    assert (level.phase, level.step, harness.deaths) == (Phase.SUCCEEDED, 3, [])
    words = rf"another orchestrator (has written to|wrote) the {written}; reading everything again"
    assert re.search(words, caplog.text)
    assert written != "bucket progress" or level.admitted_s >= 77.0, "it goes on from what it has read"


def fenced(server: MemoryServer, name: str = "orchestrator-0") -> FencedBucket:
    return FencedBucket(server.connect(name), subjects.PROGRESS)


async def stored(server: MemoryServer) -> bytes | None:
    entry = await (await server.connect("reader").bucket(subjects.PROGRESS)).get(JOB_KEY)
    return None if entry is None else entry.data


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Writes are stored, and not answered while this list has an item."""
    found: list[bool] = []

    def wrapped(call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def write(*args: object) -> object:
            result = await call(*args)
            if found:
                raise BusUnavailable("no answer")
            return result

        return write

    for name in ("create", "update", "delete"):
        monkeypatch.setattr(MemoryBucket, name, wrapped(getattr(MemoryBucket, name)))
    return found


async def test_one_that_was_replaced_or_has_not_read_a_key_overwrites_nothing_and_deletes_nothing(harness):
    old, new = fenced(harness.server), fenced(harness.server, "orchestrator-1")
    await old.put(JOB_KEY, b"Running")
    with pytest.raises(LostLease):
        await new.put(JOB_KEY, b"Queued")
    await new.entries()
    await new.put(JOB_KEY, b"Succeeded")
    for late in (old.put(JOB_KEY, b"Running, step 7"), old.delete(JOB_KEY)):
        with pytest.raises(LostLease, match=r"team-a\.sums: another orchestrator has written to the bucket progress"):
            await late
    assert await stored(harness.server) == b"Succeeded"
    await new.delete(JOB_KEY)
    with pytest.raises(LostLease):
        await old.put(JOB_KEY, b"Running, step 7")


@pytest.mark.parametrize("writes", [[b"1"], [b"1", b"2"], [None], [b"1", None]], ids=["one", "two", "deletion", "both"])
@pytest.mark.parametrize("after", [b"3", None], ids=["then a write", "then a deletion"])
@pytest.mark.parametrize("present", [False, True])
async def test_its_own_writes_without_an_answer_are_replaced(harness, unanswered, present, writes, after):
    bucket = fenced(harness.server)
    if present:
        await bucket.put(JOB_KEY, b"0")
    unanswered.append(True)
    for data in writes if present else filter(None, writes):
        with pytest.raises(BusUnavailable):
            await (bucket.delete(JOB_KEY) if data is None else bucket.put(JOB_KEY, data))
    unanswered.clear()
    for data in (after, b"4"):
        await (bucket.delete(JOB_KEY) if data is None else bucket.put(JOB_KEY, data))
        assert await stored(harness.server) == data


async def test_after_a_write_without_an_answer_another_ones_write_still_counts(harness, unanswered):
    bucket = fenced(harness.server)
    unanswered.append(True)
    with pytest.raises(BusUnavailable):
        await bucket.put(JOB_KEY, b"1")
    unanswered.clear()
    await (await harness.server.connect("other").bucket(subjects.PROGRESS)).put(JOB_KEY, b"of another")
    for late in (bucket.put(JOB_KEY, b"2"), bucket.delete(JOB_KEY)):
        with pytest.raises(LostLease):
            await late

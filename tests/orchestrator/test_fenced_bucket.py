"""Only one orchestrator writes a bucket: a write after another one's is refused, and a write of uncertain outcome is not another one's."""

from collections.abc import Callable

import pytest

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_worker.orchestrator.fenced_bucket import FencedBucket
from marlaas_worker.orchestrator.lease import LostLease

KEY = "team-a.sums"


@pytest.fixture
async def server() -> MemoryServer:
    made = MemoryServer()
    await made.connect("setup").ensure()
    return made


def fenced(server: MemoryServer, name: str = "orchestrator-0") -> FencedBucket:
    return FencedBucket(server.connect(name), subjects.PROGRESS)


async def stored(server: MemoryServer) -> bytes | None:
    entry = await (await server.connect("reader").bucket(subjects.PROGRESS)).get(KEY)
    return None if entry is None else entry.data


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether writes are answered. Those without an answer are stored all the same."""
    answered = True

    def wrapped(name: str) -> None:
        call = getattr(MemoryBucket, name)

        async def write(*args: object) -> object:
            result = await call(*args)
            if not answered:
                raise BusUnavailable("no answer")
            return result

        monkeypatch.setattr(MemoryBucket, name, write)

    def switch(on: bool) -> None:
        nonlocal answered
        answered = on

    for name in ("create", "update", "delete"):
        wrapped(name)
    return switch


async def test_a_key_is_written_replaced_deleted_and_written_again(server):
    bucket = fenced(server)
    for data in (b"1", b"2", None, b"3"):
        await (bucket.delete(KEY) if data is None else bucket.put(KEY, data))
        assert await stored(server) == data


async def test_one_that_was_replaced_overwrites_nothing_and_deletes_nothing(server):
    old, new = fenced(server), fenced(server, "orchestrator-1")
    await old.put(KEY, b"Running")
    await new.entries()
    await new.put(KEY, b"Succeeded")
    for late in (old.put(KEY, b"Running, step 7"), old.delete(KEY)):
        with pytest.raises(LostLease, match=r"team-a\.sums: another orchestrator has written to the bucket progress"):
            await late
    assert await stored(server) == b"Succeeded"
    await new.delete(KEY)
    with pytest.raises(LostLease):
        await old.put(KEY, b"Running, step 7")


async def test_one_that_has_not_read_a_key_does_not_overwrite_it(server):
    await fenced(server).put(KEY, b"Succeeded")
    with pytest.raises(LostLease):
        await fenced(server, "orchestrator-1").put(KEY, b"Queued")
    assert await stored(server) == b"Succeeded"


@pytest.mark.parametrize("present", [False, True])
async def test_its_own_writes_without_an_answer_are_replaced(server, answers, present):
    bucket = fenced(server)
    if present:
        await bucket.put(KEY, b"0")
    answers(False)
    for data in (b"1", b"2"):
        with pytest.raises(BusUnavailable):
            await bucket.put(KEY, data)
    answers(True)
    await bucket.put(KEY, b"3")
    await bucket.put(KEY, b"4")
    assert await stored(server) == b"4"


async def test_after_a_write_without_an_answer_another_ones_write_still_counts(server, answers):
    bucket = fenced(server)
    answers(False)
    with pytest.raises(BusUnavailable):
        await bucket.put(KEY, b"1")
    answers(True)
    await (await server.connect("other").bucket(subjects.PROGRESS)).put(KEY, b"of another")
    with pytest.raises(LostLease):
        await bucket.put(KEY, b"2")
    with pytest.raises(LostLease):
        await bucket.delete(KEY)


async def test_a_deletion_without_an_answer_may_be_followed_by_a_write(server, answers):
    bucket = fenced(server)
    await bucket.put(KEY, b"1")
    answers(False)
    with pytest.raises(BusUnavailable):
        await bucket.delete(KEY)
    answers(True)
    await bucket.put(KEY, b"2")
    assert await stored(server) == b"2"


async def test_a_deletion_without_an_answer_may_be_repeated_and_a_write_without_one_deleted(server, answers):
    bucket = fenced(server)
    await bucket.put(KEY, b"1")
    answers(False)
    with pytest.raises(BusUnavailable):
        await bucket.put(KEY, b"2")
    with pytest.raises(BusUnavailable):
        await bucket.delete(KEY)
    answers(True)
    await bucket.delete(KEY)
    assert await stored(server) is None
    await bucket.put(KEY, b"3")
    assert await stored(server) == b"3"

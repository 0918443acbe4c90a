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


async def test_one_that_was_replaced_or_has_not_read_a_key_overwrites_nothing_and_deletes_nothing(server):
    old, new = fenced(server), fenced(server, "orchestrator-1")
    await old.put(KEY, b"Running")
    with pytest.raises(LostLease):
        await new.put(KEY, b"Queued")
    await new.entries()
    await new.put(KEY, b"Succeeded")
    for late in (old.put(KEY, b"Running, step 7"), old.delete(KEY)):
        with pytest.raises(LostLease, match=r"team-a\.sums: another orchestrator has written to the bucket progress"):
            await late
    assert await stored(server) == b"Succeeded"
    await new.delete(KEY)
    with pytest.raises(LostLease):
        await old.put(KEY, b"Running, step 7")


@pytest.mark.parametrize(
    "unanswered", [[b"1"], [b"1", b"2"], [None], [b"1", None]], ids=["a write", "two", "a deletion", "both"]
)
@pytest.mark.parametrize("after", [b"3", None], ids=["then a write", "then a deletion"])
@pytest.mark.parametrize("present", [False, True])
async def test_its_own_writes_without_an_answer_are_replaced(server, answers, present, unanswered, after):
    bucket = fenced(server)
    if present:
        await bucket.put(KEY, b"0")
    answers(False)
    for data in unanswered if present else filter(None, unanswered):
        with pytest.raises(BusUnavailable):
            await (bucket.delete(KEY) if data is None else bucket.put(KEY, data))
    answers(True)
    for data in (after, b"4"):
        await (bucket.delete(KEY) if data is None else bucket.put(KEY, data))
        assert await stored(server) == data


async def test_after_a_write_without_an_answer_another_ones_write_still_counts(server, answers):
    bucket = fenced(server)
    answers(False)
    with pytest.raises(BusUnavailable):
        await bucket.put(KEY, b"1")
    answers(True)
    await (await server.connect("other").bucket(subjects.PROGRESS)).put(KEY, b"of another")
    for late in (bucket.put(KEY, b"2"), bucket.delete(KEY)):
        with pytest.raises(LostLease):
            await late

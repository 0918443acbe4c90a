"""Fenced keys and subjects: another process's write is never overwritten, and a write without a reply happens once."""

import pytest

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable, RevisionConflict
from marlaas_api.fenced import FencedKey, FencedSubject, Overtaken


class Unanswered:
    """A bus or bucket whose writes are stored, and not answered while `silent`."""

    silent = False

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        async def call(*args, **named):
            result = await getattr(self._real, name)(*args, **named)
            if self.silent:
                raise BusUnavailable("no answer")
            return result

        return getattr(self._real, name) if name == "name" else call


async def write(key: FencedKey, data: bytes | None) -> None:
    await (key.delete() if data is None else key.write(data))


async def test_a_write_that_is_repeated_under_its_id_happens_once_and_later_ones_of_that_revision_not_at_all(bus, ns):
    bucket, key = await bus.bucket(subjects.PROGRESS), f"{ns}.job"
    first = await bucket.create(key, b"1", message_id=f"{ns}-1")
    assert await bucket.create(key, b"1", message_id=f"{ns}-1") == first
    second = await bucket.update(key, b"2", first, message_id=f"{ns}-2")
    assert await bucket.update(key, b"2", first, message_id=f"{ns}-2") == second
    with pytest.raises(RevisionConflict):
        await bucket.update(key, b"2", first, message_id=f"{ns}-3")
    for _ in range(2):
        await bucket.delete(key, second, message_id=f"{ns}-4")
    third = await bucket.create(key, b"1", message_id=f"{ns}-5")
    assert (await bucket.get(key)).revision == await bucket.create(key, b"1", message_id=f"{ns}-5") == third


async def test_one_that_was_replaced_or_has_not_read_a_key_overwrites_nothing_and_deletes_nothing(bus, ns):
    bucket = await bus.bucket(subjects.PROGRESS)
    old, new = FencedKey(bucket, f"{ns}.job"), FencedKey(bucket, f"{ns}.job")
    await old.write(b"Running")
    with pytest.raises(Overtaken):
        await new.write(b"Queued")
    assert await new.read() == b"Running"
    await new.write(b"Succeeded")
    for late in (old.write(b"Running, step 7"), old.delete()):
        with pytest.raises(
            Overtaken, match=rf"another process has written to the key {ns}\.job of the bucket progress"
        ):
            await late
    assert (await bucket.get(f"{ns}.job")).data == b"Succeeded"
    await new.delete()
    with pytest.raises(Overtaken):
        await old.write(b"Running, step 7")
    await new.write(b"Succeeded")  # the same words again, soon after: not taken for a repeated write
    assert await old.read() == b"Succeeded"


@pytest.mark.parametrize("writes", [[b"1"], [b"1", b"2"], [None], [b"1", None]], ids=["one", "two", "deletion", "both"])
@pytest.mark.parametrize("after", [b"3", None], ids=["then a write", "then a deletion"])
@pytest.mark.parametrize("present", [False, True])
async def test_its_own_writes_without_an_answer_are_replaced(bus, ns, present, writes, after):
    bucket = Unanswered(await bus.bucket(subjects.PROGRESS))
    key = FencedKey(bucket, f"{ns}.job")
    if present:
        await key.write(b"0")
    bucket.silent = True
    for data in writes if present else filter(None, writes):
        with pytest.raises(BusUnavailable):
            await write(key, data)
    bucket.silent = False
    for data in (after, b"4"):
        await write(key, data)
        entry = await bucket.get(f"{ns}.job")
        assert (None if entry is None else entry.data) == data


async def test_after_a_write_without_an_answer_another_ones_write_still_counts(bus, ns):
    key = FencedKey(bucket := Unanswered(await bus.bucket(subjects.PROGRESS)), f"{ns}.job")
    bucket.silent = True
    with pytest.raises(BusUnavailable):
        await key.write(b"1")
    bucket.silent = False
    await bucket.put(f"{ns}.job", b"of another")
    for late in (key.write(b"2"), key.delete()):
        with pytest.raises(Overtaken):
            await late
    assert (await bucket.get(f"{ns}.job")).data == b"of another"


async def test_a_log_has_each_message_of_its_one_writer_once_and_none_of_another(bus, ns):
    subject, silent = subjects.job_log(ns, "job"), Unanswered(bus)
    ours, theirs = FencedSubject(silent, subject), FencedSubject(bus, subject)
    silent.silent = True
    with pytest.raises(BusUnavailable):
        await ours.append(b"1")
    silent.silent = False
    assert await ours.append(b"1") < await ours.append(b"2") == ours.last
    with pytest.raises(Overtaken, match=f"the subject {subject}"):
        await theirs.append(b"1")
    assert [stored.data for stored in await bus.replay(subjects.GROUPS, subject)] == [b"1", b"2"]

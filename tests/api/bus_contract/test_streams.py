"""What is published, kept and read again; and core messages: heard by who listens, and kept by nobody."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from tests.api.bus_contract.conftest import soon

from marlaas_api import subjects
from marlaas_api.bus import BusRefused, BusUnavailable, Request, RevisionConflict, StreamFull, StreamState
from marlaas_api.subjects import StreamSpec

EPISODES = subjects.EPISODES


async def test_messages_come_back_whole_up_to_the_limit(bus, ns):
    subject = subjects.turn(ns, "job", "uid-t0-0-1", 0)
    large = bytes(bus.max_payload_bytes)
    await bus.publish(subject, b"")
    await bus.publish(subject, large, message_id="an-id-that-is-as-long-as-ids-are" * 4)
    with pytest.raises(BusRefused, match=subject):
        await bus.publish(subject, bytes(bus.max_payload_bytes + 1))
    await bus.publish(subject, b"and the bus goes on")
    assert [stored.data for stored in await bus.replay(subjects.TURNS, subject)] == [b"", large, b"and the bus goes on"]


@pytest.mark.parametrize("subject", ["nobody.stores.this", "a b", "a..b", "", "task.*.x"])
async def test_what_is_not_a_subject_or_has_no_stream_is_refused(bus, subject):
    with pytest.raises(BusRefused, match=re.escape(f'"{subject}"') if "nobody" in subject else None):
        await bus.publish(subject, b"1")


async def test_the_same_message_id_is_stored_once(bus, ns):
    subject = subjects.episode(ns, "job")
    first = await bus.publish(subject, b"1", message_id=f"{ns}-1")
    other = await bus.publish(subject, b"2", message_id=f"{ns}-2")
    assert await bus.publish(subject, b"again", message_id=f"{ns}-1") == first
    assert [stored.sequence for stored in await bus.replay(EPISODES, subject)] == [first, other]


async def test_the_first_writer_of_a_subject_wins_and_may_repeat_itself_under_its_id(bus, ns):
    subject = subjects.turn(ns, "job", "episode", 0)
    sequence = await bus.publish(subject, b"mine", expect_last=0, message_id=f"{ns}-mine")
    assert await bus.publish(subject, b"mine", expect_last=0, message_id=f"{ns}-mine") == sequence
    for message_id in (None, f"{ns}-yours"):
        with pytest.raises(RevisionConflict, match=subject):
            await bus.publish(subject, b"yours", expect_last=0, message_id=message_id)
    assert await bus.publish(subject, b"next", expect_last=sequence) > sequence
    last = await bus.last(subjects.TURNS, subject)
    assert last.data == b"next"


async def test_of_many_racing_writers_exactly_one_wins(dial, ns):
    buses = [await dial(f"racer-{number}") for number in range(4)]
    subject = subjects.job_log(ns, "job")
    calls = [bus.publish(subject, b"x", expect_last=0) for bus in buses for _ in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, RevisionConflict) for result in results) == 19


async def test_a_missing_stream_is_refused_by_name(bus):
    calls = bus.last("NOWHERE", "a.b"), bus.replay("NOWHERE", "a.b"), bus.consumer("NOWHERE", "name", "a.b")
    for call in (*calls, bus.bucket("nowhere")):
        with pytest.raises(BusRefused, match=r"(?i)nowhere"):
            await call


async def test_replay_takes_wildcards_and_a_start_and_last_is_the_newest_of_one_subject(bus, ns):
    for episode in ("a", "b"):
        for number in range(3):
            await bus.publish(subjects.turn(ns, "job", episode, number), f"{episode}{number}".encode())
    found = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "*", "*"))
    assert [stored.data for stored in found] == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]
    one = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "a", "*"))
    assert [stored.data for stored in one] == [b"a0", b"a1", b"a2"]
    rest = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "*", "*"), start=found[2].sequence)
    assert rest == found[2:]
    assert await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "c", "*")) == []
    await bus.publish(subjects.turn(ns, "job", "a", 1), b"newer")
    last = await bus.last(subjects.TURNS, subjects.turn(ns, "job", "a", 1))
    assert (last.subject, last.data) == (subjects.turn(ns, "job", "a", 1), b"newer")
    assert await bus.last(subjects.TURNS, subjects.turn(ns, "job", "a", 3)) is None


async def test_pages_are_the_replay_in_parts_that_need_not_fit_in_memory(bus, ns):
    subject, large = subjects.turn(ns, "job", "a", "*"), bytes(bus.max_payload_bytes - 4096)
    for number in range(5):
        await bus.publish(subjects.turn(ns, "job", "a", number), large)
    for start in range(5, 1505, 250):
        numbers = range(start, start + 250)
        await asyncio.gather(*(bus.publish(subjects.turn(ns, "job", "a", at), b"%d" % at) for at in numbers))
    pages = [page async for page in bus.pages(subjects.TURNS, subject)]
    assert [stored for page in pages for stored in page] == await bus.replay(subjects.TURNS, subject)
    assert sum(map(len, pages)) == 1505
    assert max(map(len, pages)) <= 1000
    assert max(sum(len(stored.data) for stored in page) for page in pages) <= 24 << 20


async def test_purge_forgets_a_subject_or_the_part_below_a_sequence(bus, ns):
    subject, other = subjects.episode(ns, "job"), subjects.episode(ns, "other")
    sequences = [await bus.publish(subject, b"x") for _ in range(4)]
    await bus.publish(other, b"stays")
    await bus.purge(EPISODES, subject, up_to=sequences[2])
    assert [stored.sequence for stored in await bus.replay(EPISODES, subject)] == sequences[2:]
    await bus.purge(EPISODES, subject, up_to=1)
    assert len(await bus.replay(EPISODES, subject)) == 2
    await bus.purge(EPISODES, subject)
    assert await bus.replay(EPISODES, subject) == []
    assert [stored.data for stored in await bus.replay(EPISODES, other)] == [b"stays"]


async def test_a_full_work_queue_refuses_for_the_moment(bus):
    await bus.purge("FULL", "full.*")
    results = await asyncio.gather(*(bus.publish("full.x", bytes(1000)) for _ in range(5)), return_exceptions=True)
    assert isinstance(results[0], int)
    assert isinstance(results[-1], BusUnavailable)
    assert "maximum bytes exceeded" in str(results[-1])


async def test_a_full_log_of_live_data_refuses_until_there_is_room_and_says_where_it_stands(bus):
    await bus.purge("KEEPING", "keeping.*")
    before = await bus.state("KEEPING")
    stored = [await bus.publish("keeping.x", bytes(1000)) for _ in range(3)]
    after = await bus.state("KEEPING")
    assert before == StreamState(stored[0] - 1, 0, 4096)
    assert (after.last_sequence, after.max_bytes) == (stored[2], 4096)
    assert 3000 <= after.num_bytes < 3600
    with pytest.raises(StreamFull, match="maximum bytes exceeded"):
        await bus.publish("keeping.y", bytes(1200), expect_last=0, message_id="y")
    with pytest.raises(RevisionConflict):
        await bus.publish("keeping.x", bytes(1200), expect_last=0)
    assert [one.sequence for one in await bus.replay("KEEPING", "keeping.*")] == stored
    await bus.purge("KEEPING", "keeping.x", up_to=stored[2])
    assert await bus.publish("keeping.y", bytes(1200), expect_last=0, message_id="y") > stored[2]


async def test_a_consumer_says_how_far_it_has_acked(bus, ns):
    subject, other = subjects.episode(ns, "job"), subjects.episode(ns, "other")
    assert await bus.position(EPISODES, f"{ns}_job_reader") is None
    sequences = [await bus.publish(one, b"x") for one in (subject, other, subject, subject)]
    consumer = await bus.consumer(EPISODES, f"{ns}_job_reader", subject)

    async def position() -> tuple[int, list[bool]]:
        found = await bus.position(EPISODES, f"{ns}_job_reader")
        return found.num_behind, [found.has_acked(sequence) for sequence in sequences]

    assert await position() == (3, [False] * 4)
    first, second, _ = await soon(consumer.fetch(3, 10))
    await second.ack()
    assert await position() == (2, [False] * 4)
    await first.ack()
    assert await position() == (1, [True, True, True, False])


async def test_who_acks_what_was_purged_is_not_behind(bus, ns):
    subject = subjects.job_log(ns, "job")
    sequences = [await bus.publish(subject, b"x") for _ in range(3)]
    consumer = await bus.consumer(subjects.GROUPS, f"{ns}_job_agent_trainer", subject)
    deliveries = await soon(consumer.fetch(3, 10))
    await bus.purge(subjects.GROUPS, subject, up_to=sequences[2])
    for delivery in deliveries:
        await soon(delivery.ack())
    position = await bus.position(subjects.GROUPS, f"{ns}_job_agent_trainer")
    assert position.num_behind == 0
    with pytest.raises(RevisionConflict):
        await bus.publish(subject, b"late", expect_last=sequences[1])
    assert await bus.publish(subject, b"next", expect_last=sequences[2]) > sequences[2]


async def test_a_full_log_forgets_its_oldest_but_not_for_a_message_that_is_too_long(bus):
    """No other stream than that of the episodes is written by others than the platform: no flood fills the disk."""
    sequences = [await bus.publish("forgetful.x", bytes(1000)) for _ in range(8)]
    kept = [stored.sequence for stored in await bus.replay("FORGETFUL", "forgetful.x")]
    assert kept == sequences[-len(kept) :]
    assert 0 < len(kept) < 5
    with pytest.raises(BusRefused, match="message size exceeds maximum allowed"):
        await bus.publish("forgetful.x", bytes(3000))
    assert [stored.sequence for stored in await bus.replay("FORGETFUL", "forgetful.x")] == kept
    (episodes,) = [stream for stream in subjects.STREAMS if stream.name == EPISODES]
    assert 0 < episodes.max_message_bytes < episodes.max_bytes < 20 << 30


async def test_ensure_can_be_repeated_and_updates_what_differs_but_never_the_retention(bus, ns):
    subject = subjects.episode(ns, "job")
    await bus.publish(subject, b"1")
    await bus.ensure()
    grown = StreamSpec("FORGETFUL", ("forgetful.*", "forgetful.*.*"), max_bytes=4096, max_message_bytes=2048)
    await bus.ensure((grown,), ())  # type: ignore[call-arg]
    assert await bus.publish("forgetful.x.y", b"1") > 0
    assert len(await bus.replay(EPISODES, subject)) == 1
    with pytest.raises(BusRefused, match="FORGETFUL"):
        await bus.ensure((StreamSpec("FORGETFUL", ("forgetful.*",), work_queue=True),), ())  # type: ignore[call-arg]


async def test_a_listener_hears_in_order_what_is_sent_from_its_first_moment(dial, ns):
    here, there = await dial("here"), await dial("there")
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with here.listen(f"gen.{ns}.job.*", heard.put):
        for number in range(100):
            await there.send(f"gen.{ns}.job.agent", b"%d" % number, "reply.to")
        found = [await soon(heard.get()) for _ in range(100)]
    assert found[0] == Request(f"gen.{ns}.job.agent", "reply.to", b"0")
    assert [request.data for request in found] == [b"%d" % number for number in range(100)]


async def test_members_of_a_queue_share_and_others_hear_all(dial, ns):
    heard: dict[str, list[bytes]] = {"one": [], "other": [], "all": []}
    done = asyncio.Event()

    def collect(name: str) -> Callable[[Request], Awaitable[None]]:
        async def handler(request: Request) -> None:
            heard[name].append(request.data)
            if len(heard["one"]) + len(heard["other"]) == 40 and len(heard["all"]) == 40:
                done.set()

        return handler

    one, other, sender = await dial("one"), await dial("other"), await dial("sender")
    subject = f"gen.{ns}.job.agent"
    async with (
        one.listen(subject, collect("one"), queue="rollout"),
        other.listen(subject, collect("other"), queue="rollout"),
        other.listen(subject, collect("all")),
    ):
        for number in range(40):
            await sender.send(subject, b"%d" % number)
        await soon(done.wait())
    assert sorted(heard["one"] + heard["other"]) == sorted(heard["all"])
    assert heard["one"]
    assert heard["other"]


async def test_answers_come_back_to_an_inbox(dial, ns):
    asker, answerer = await dial("asker"), await dial("answerer")
    answers: asyncio.Queue[Request] = asyncio.Queue()
    inbox = asker.new_inbox()
    assert inbox != asker.new_inbox()

    async def answer(request: Request) -> None:
        await answerer.send(request.reply, request.data.upper())

    async with asker.listen(inbox, answers.put), answerer.listen(f"gen.{ns}.job.agent", answer):
        await asker.send(f"gen.{ns}.job.agent", b"hello", inbox)
        assert (await soon(answers.get())).data == b"HELLO"


async def test_a_listener_of_a_stored_subject_hears_it_too_and_after_the_context_nobody_does(bus, ns):
    heard: asyncio.Queue[Request] = asyncio.Queue()
    with pytest.raises(LookupError, match="an error of the block comes out as itself"):
        async with bus.listen(f"event.{ns}.a.*", heard.put):
            raise LookupError("an error of the block comes out as itself")
    async with bus.listen(f"event.{ns}.*.*", heard.put):
        await bus.publish(subjects.event(ns, "a", "trainer"), b"1")
        assert (await soon(heard.get())).data == b"1"
    assert heard.empty()


async def test_a_handler_that_fails_ends_the_context_with_its_error(bus, ns):
    async def broken(request: Request) -> None:
        raise LookupError(request.data.decode())

    async def block() -> None:
        async with bus.listen(f"gen.{ns}.a", broken):
            await bus.send(f"gen.{ns}.a", b"boom")
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="boom"):
        await soon(block())


async def test_a_closed_bus_refuses_everything(bus, ns):
    await bus.close()
    await bus.close()
    subject = subjects.episode(ns, "job")
    for call in (bus.publish(subject, b"1"), bus.send("a.b", b"1"), bus.last(EPISODES, subject)):
        with pytest.raises(BusRefused, match="closed"):
            await call

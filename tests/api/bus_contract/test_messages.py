"""Core messages: heard by who listens, and kept by nobody."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.api.bus_contract.asking import Connect, soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, Request

EPISODES = subjects.EPISODES


async def test_a_listener_hears_in_order_what_is_sent_from_its_first_moment(dial: Connect, ns: str) -> None:
    here, there = await dial("here"), await dial("there")
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with here.listen(f"gen.{ns}.job.*", heard.put):
        for number in range(100):
            await there.send(f"gen.{ns}.job.agent", b"%d" % number, "reply.to")
        found = [await soon(heard.get()) for _ in range(100)]
    assert found[0] == Request(f"gen.{ns}.job.agent", "reply.to", b"0")
    assert [request.data for request in found] == [b"%d" % number for number in range(100)]


async def test_members_of_a_queue_share_and_others_hear_all(dial: Connect, ns: str) -> None:
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


async def test_answers_come_back_to_an_inbox(dial: Connect, ns: str) -> None:
    asker, answerer = await dial("asker"), await dial("answerer")
    answers: asyncio.Queue[Request] = asyncio.Queue()
    inbox = asker.new_inbox()
    assert inbox != asker.new_inbox()

    async def answer(request: Request) -> None:
        await answerer.send(request.reply, request.data.upper())

    async with asker.listen(inbox, answers.put), answerer.listen(f"gen.{ns}.job.agent", answer):
        await asker.send(f"gen.{ns}.job.agent", b"hello", inbox)
        assert (await soon(answers.get())).data == b"HELLO"


async def test_a_listener_of_a_stored_subject_hears_it_too_and_after_the_context_nobody_does(bus: Bus, ns: str) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    with pytest.raises(LookupError, match="an error of the block comes out as itself"):
        async with bus.listen(f"event.{ns}.a.*", heard.put):
            raise LookupError("an error of the block comes out as itself")
    async with bus.listen(f"event.{ns}.*.*", heard.put):
        await bus.publish(subjects.event(ns, "a", "trainer"), b"1")
        assert (await soon(heard.get())).data == b"1"
    assert heard.empty()


async def test_a_handler_that_fails_ends_the_context_with_its_error(bus: Bus, ns: str) -> None:
    async def broken(request: Request) -> None:
        raise LookupError(request.data.decode())

    async def block() -> None:
        async with bus.listen(f"gen.{ns}.a", broken):
            await bus.send(f"gen.{ns}.a", b"boom")
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="boom"):
        await soon(block())


async def test_a_closed_bus_refuses_everything(bus: Bus, ns: str) -> None:
    await bus.close()
    await bus.close()
    subject = subjects.episode(ns, "job")
    for call in (bus.publish(subject, b"1"), bus.send("a.b", b"1"), bus.last(EPISODES, subject)):
        with pytest.raises(BusRefused, match="closed"):
            await call

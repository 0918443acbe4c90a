"""Turns: asking for them, which of their time counts, silence, failures and places for episodes. In virtual time."""

import asyncio
from typing import Any

import ormsgpack
import pytest
from tests.sandbox.conftest import Rollout
from tests.tables import rows

from marlaas_api import subjects, wire
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import ChatMessage, GenerateRequest
from marlaas_worker.sandbox import turns
from marlaas_worker.sandbox.service import FIRST_EPISODES, FIRST_S, EpisodePlaces
from marlaas_worker.sandbox.turns import TurnClock
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
IDENTITY = {"namespace": "team-a", "job": "job", "uid": "u1", "agent": "policy", "group": "u1-t0", "member": 0}


def request(turn=0, text="?"):
    appended = (ChatMessage(role="user", content=text),)
    return GenerateRequest(
        **IDENTITY, episode="u1-t0-0-1", turn=turn, parent=None, append=appended, deadline_s=turns.LEASE_S
    )


@pytest.fixture
def server():
    return MemoryServer(virtual_time.now)


@pytest.fixture
async def rollout(server):
    made = Rollout(server)
    await made.bus.ensure()
    async with made.bus.listen(subjects.generation("team-a", "job", "policy"), made.on_request, "rollout"):
        yield made


@pytest.fixture
async def client(server, rollout):
    async with turns.TurnClient(server.connect("sandbox")) as made:
        yield made


def passed_s():
    return virtual_time.now() - virtual_time.START


async def test_silence_is_answered_by_asking_again_with_the_same_name(client, rollout):
    rollout.answer = lambda asked: [rollout.result(asked, "1")] if len(rollout.requests) > 2 else []
    assert (await client.generate(request(), 60.0)).text == "1"
    assert rollout.requests == [request()] * 3
    assert passed_s() == 10.0


async def test_a_failure_of_the_moment_is_tried_again_after_longer_and_longer_pauses(client, rollout):
    def answer(asked):
        fails = len(rollout.requests) <= 7
        return [rollout.failure(asked, "restarting", True) if fails else rollout.result(asked, "1")]

    rollout.answer = answer
    assert (await client.generate(request(), 60.0)).text == "1"
    assert passed_s() == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2.0 + 2.0)


@pytest.mark.parametrize(("cause", "error", "where"), rows(__file__, "failures_for_good"))
async def test_a_failure_for_good_is_raised_in_its_own_words(client, rollout, cause, error, where):
    rollout.answer = lambda asked: [rollout.failure(asked, "the end", False).model_copy(update=cause)]
    with pytest.raises(getattr(turns, error), match=f"^{where}the end$"):
        await client.generate(request(), 60.0)
    assert len(rollout.requests) == 1


async def test_an_engine_that_takes_too_long_for_a_turn_or_fails_for_so_long_has_it_cancelled(client, rollout):
    """Nothing but the heartbeat wakes the wait for a reply: it brings the timeout nearer."""
    rollout.answer = lambda asked: [rollout.beat(asked), rollout.beat(asked, running_s=69.0)]
    words = r"within 70 s, waits not counted \(turnTimeoutSeconds\); last: rollout-0: heart"
    with pytest.raises(turns.TurnOverran, match=words):
        await client.generate(request(), 70.0)
    assert passed_s() == pytest.approx(1.0)
    await asyncio.sleep(0)
    assert [cancel.episode for cancel in rollout.cancelled] == ["u1-t0-0-1"]
    rollout.answer = lambda asked: [rollout.failure(asked, "KeyError('x')", True)]
    with pytest.raises(turns.TurnOverran, match=r"within 10 s.*last: rollout-0: KeyError\('x'\)"):
        await client.generate(request(), 10.0)


@pytest.mark.parametrize("answers", ["nobody", "no place"])
async def test_a_turn_that_never_gets_its_place_has_waited_and_is_cancelled(client, rollout, answers):
    full = {"waits": True}
    rollout.answer = lambda asked: (
        [rollout.failure(asked, "no place", True).model_copy(update=full)] if answers == "no place" else []
    )
    with pytest.raises(turns.TurnWaited, match="no place" if answers == "no place" else "no reply"):
        await client.generate(request(), 0.01)
    assert passed_s() == pytest.approx(turns.WAIT_S, abs=2.0)
    await asyncio.sleep(0)
    assert len(rollout.cancelled) == 1


async def test_a_request_that_waits_is_kept_alive_and_the_wait_does_not_count(client, rollout):
    rollout.answer = lambda asked: []

    async def beats():
        while True:
            await rollout.answer_open(lambda asked: [rollout.beat(asked)])
            await asyncio.sleep(1.0)

    beating = asyncio.create_task(beats())
    asking = asyncio.create_task(client.generate(request(), 0.1))
    async with asyncio.timeout(turns.WAIT_S):
        await rollout.until(lambda: len(rollout.kept) == 3)
    beating.cancel()
    await rollout.answer_open()
    assert (await asking).text == "1"
    assert passed_s() == turns.LEASE_S
    assert {(kept.uid, kept.agent, kept.episode) for kept in rollout.kept} == {("u1", "policy", "u1-t0-0-1")}
    assert rollout.requests == [request()]


async def test_garbage_late_answers_and_those_of_a_newer_release_on_the_inbox_are_ignored(client, rollout):
    async def send_garbage(asked):
        for data in (b"garbage", ormsgpack.packb({"v": wire.SCHEMA_VERSION + 1})):
            await rollout.bus.send(asked.reply, data)

    def answer(asked):
        good = rollout.result(asked, str(asked.turn))
        return [rollout.result(asked.model_copy(update={"turn": 99}), "wrong"), good, good]

    rollout.answer = answer
    async with rollout.bus.listen(subjects.generation("team-a", "job", "policy"), send_garbage):
        assert [(await client.generate(request(turn), 9.0)).text for turn in (0, 1)] == ["0", "1"]


async def test_a_bus_that_comes_back_in_time_costs_nothing_but_time(client, rollout, server):
    server.available = False
    asking = asyncio.create_task(client.generate(request(), 0.1))
    await asyncio.sleep(600.0)
    server.available = True
    assert (await asking).text == "1"


async def test_what_does_not_fit_into_a_message_is_refused(client, rollout):
    with pytest.raises(turns.TurnTooLong, match="a message has at most"):
        await client.generate(request(text="x" * (9 << 20)), 9.0)
    assert rollout.requests == []


def clock(*heard: tuple[Any, ...]):
    """A clock of a turn asked for at second 0, with 10 s for the engine and 100 s to wait, after what it heard and when."""
    made = TurnClock(timeout_s=10.0, wait_s=100.0, at=0.0)
    for hear, *words in heard:
        getattr(made, hear)(*words)
    return made


@pytest.mark.parametrize(("case", "heard", "at", "left_s"), rows(__file__, "turn_clock"))
def test_only_the_engines_time_and_failures_count_against_a_turn(case, heard, at, left_s):
    made = clock(*heard)
    made.advance(at)
    assert made.left_s == pytest.approx(left_s)


MOST = 3 * FIRST_EPISODES


class Crowd:
    """Episodes that want a place. `num_playing` of them have one; an episode ends when a test says so."""

    def __init__(self, group, places):
        self.num_playing = 0
        self.ends = asyncio.Semaphore(0)
        for _ in range(2 * MOST):
            group.create_task(self._play(places))

    async def _play(self, places):
        async with places.place():
            self.num_playing += 1
            await self.ends.acquire()
            self.num_playing -= 1

    def end(self, num):
        for _ in range(num):
            self.ends.release()


@pytest.mark.parametrize("one_ends", [True, False], ids=["until one has ended", "for a while after loading"])
async def test_at_first_few_episodes_run_at_once_and_then_as_many_as_allowed(one_ends):
    places, loaded = EpisodePlaces(MOST), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(places.open_after(loaded))
        crowd = Crowd(group, places)
        await asyncio.sleep(100.0)
        assert crowd.num_playing == FIRST_EPISODES
        if one_ends:
            crowd.end(1)
        else:
            loaded.set()
            await asyncio.sleep(FIRST_S - 0.1)
            assert crowd.num_playing == FIRST_EPISODES
        await asyncio.sleep(0.2)
        assert crowd.num_playing == MOST
        opening.cancel()
        crowd.end(2 * MOST)


async def test_waiting_for_a_place_takes_none_and_ends_at_a_stop():
    places, stop = EpisodePlaces(1), asyncio.Event()
    assert await places.wait(stop)
    async with places.place():
        waiting = asyncio.create_task(places.wait(stop))
        await asyncio.sleep(100.0)
        assert not waiting.done()
        stop.set()
        assert not await waiting

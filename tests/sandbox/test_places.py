"""Places for episodes, in virtual time."""

import asyncio

import pytest

from marlaas_worker.sandbox.places import FIRST_EPISODES, FIRST_S, EpisodePlaces
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
MOST = 3 * FIRST_EPISODES


class Crowd:
    """Episodes that want a place. `num_playing` of them have one; an episode ends when a test says so."""

    def __init__(self, group: asyncio.TaskGroup, places: EpisodePlaces) -> None:
        self.num_playing = 0
        self.ends = asyncio.Semaphore(0)
        for _ in range(2 * MOST):
            group.create_task(self._play(places))

    async def _play(self, places: EpisodePlaces) -> None:
        async with places.place():
            self.num_playing += 1
            await self.ends.acquire()
            self.num_playing -= 1

    def end(self, num: int) -> None:
        for _ in range(num):
            self.ends.release()


@pytest.mark.parametrize("one_ends", [True, False], ids=["until one has ended", "for a while after loading"])
async def test_at_first_few_episodes_run_at_once_and_then_as_many_as_allowed(one_ends: bool) -> None:
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


async def test_waiting_for_a_place_takes_none_and_ends_at_a_stop() -> None:
    places, stop = EpisodePlaces(1), asyncio.Event()
    assert await places.wait(stop)
    async with places.place():
        waiting = asyncio.create_task(places.wait(stop))
        await asyncio.sleep(100.0)
        assert not waiting.done()
        stop.set()
        assert not await waiting

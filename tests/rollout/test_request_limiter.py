"""Places in the engine: who is next, which episodes are open, and a request that runs alone."""

import asyncio
import contextlib

from marlaas_worker.rollout.accounts import OPEN_S, Account
from marlaas_worker.rollout.request_limiter import RequestLimiter


def account(job: str, tenant: str = "team-a", weight: float = 1.0) -> Account:
    return Account(tenant, weight, job)


async def test_the_limiter_admits_no_more_requests_than_its_capacity():
    limiter, inside, most = RequestLimiter(3), 0, 0

    async def visit(number: int) -> None:
        nonlocal inside, most
        async with limiter.place(account(f"job-{number % 4}"), 1, 0):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(visit(number) for number in range(40)))
    assert (most, inside, limiter.num_waiting) == (3, 0, 0)


async def test_a_request_costs_what_its_holder_says_and_not_the_estimate():
    limiter = RequestLimiter(1)
    with limiter.episodes.request(account("a"), "a-1"):
        with contextlib.suppress(RuntimeError):
            async with limiter.place(account("a"), 5, 0):
                raise RuntimeError("the engine refused it")
        assert limiter.usage("team-a") == 0
        async with limiter.place(account("a"), 5, 0) as place:
            place.cost = 50.0
        assert limiter.usage("team-a") == 50


class Visits:
    """Requests of two tenants, one after another, on a clock of their own. The engine is never full; `num_kv` tokens fit."""

    def __init__(self, num_kv: int = 0) -> None:
        self.now = 0.0
        self.limiter = RequestLimiter(1, clock=lambda: self.now, kv_tokens=num_kv)

    async def visit(self, tenant: str, episode: str, cost: float, takes_s: float = 0.0) -> None:
        who = account(f"job-{tenant}", tenant)
        with self.limiter.episodes.request(who, episode):
            async with self.limiter.place(who, 1, 0) as place:
                self.now += takes_s
                place.cost = cost

    async def returns(self, tenant: str, episode: str) -> float:
        """The usage with which a tenant waits for a place for its next turn."""
        with self.limiter.episodes.request(account(f"job-{tenant}", tenant), episode):
            return self.limiter.usage(tenant)


async def test_an_episode_counts_as_open_for_a_while_after_its_last_request_has_ended():
    visits = Visits()
    await visits.visit("a", "a-1", 1.0, takes_s=2 * OPEN_S)
    for number in range(3):
        await visits.visit("b", f"b-{number}", 100.0)
    visits.now += OPEN_S - 1
    assert await visits.returns("a", "a-1") == 1, "its episode waits for a tool, and keeps its credit"
    visits.now += OPEN_S + 1
    await visits.visit("b", "b-4", 100.0)
    assert await visits.returns("a", "a-2") == 401, "lifted to the usage of the active tenant"


async def test_an_episode_whose_request_waits_for_its_version_is_open_for_as_long_as_it_waits():
    visits = Visits()
    with visits.limiter.episodes.request(account("job-a", "a"), "a-1"):
        for number in range(3):
            visits.now += 2 * OPEN_S
            await visits.visit("b", f"b-{number}", 100.0)
        assert visits.limiter.usage("a") == 0
        assert len(visits.limiter.episodes) == 2, "those of `b` that ended long ago are closed"


async def test_a_place_whose_owner_gave_up_goes_to_the_next():
    limiter = RequestLimiter(1)
    entered: list[str] = []
    leave = asyncio.Event()

    async def visit(name: str) -> None:
        async with limiter.place(account(name), 1, 0):
            entered.append(name)
            await leave.wait()

    visits = [
        asyncio.ensure_future(visit(name)) for name in ("first", "gone while waiting", "gone when called", "last")
    ]
    await asyncio.sleep(0)
    visits[1].cancel()
    await asyncio.sleep(0)
    visits[0].cancel()
    visits[2].cancel()
    leave.set()
    await asyncio.gather(*visits, return_exceptions=True)
    assert entered == ["first", "last"]
    async with limiter.place(account("after all"), 1, 0):
        assert limiter.num_waiting == 0


async def test_a_lone_request_waits_for_the_others_and_admits_none_until_it_ends():
    limiter, seen = RequestLimiter(4), list[str]()
    first, lone = asyncio.Event(), asyncio.Event()

    async def run(name: str, until: asyncio.Event) -> None:
        async with limiter.place(account("job"), 1, 0):
            seen.append(name)
            await until.wait()

    async def run_alone() -> None:
        with limiter.episodes.request(account("job"), "episode"):
            async with limiter.alone(account("job")) as place:
                seen.append("lone")
                place.cost = 30.0
                await lone.wait()

    async with asyncio.TaskGroup() as group:
        for work in (run("first", first), run_alone(), run("later", first)):
            group.create_task(work)
            await asyncio.sleep(0)
        assert seen == ["first"]
        first.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == ["first", "lone"]
        lone.set()
    assert seen == ["first", "lone", "later"]
    assert limiter.usage("team-a") == 30.0


async def test_a_lone_request_that_is_cancelled_lets_the_others_in():
    limiter = RequestLimiter(4)

    async def run_alone() -> None:
        async with limiter.alone(account("job")):
            await asyncio.Event().wait()

    async with limiter.place(account("job"), 1, 0):
        lone = asyncio.create_task(run_alone())
        await asyncio.sleep(0)
        lone.cancel()
        await asyncio.wait({lone})
        async with limiter.place(account("job"), 1, 0):
            pass

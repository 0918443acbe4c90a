"""The pure parts: who is next, who owns what, who is charged, what is tried again."""

import asyncio
import contextlib
from collections import Counter

import pytest

from marlaas_api.blobs import BlobRefused
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.rollout.accounts import OPEN_S, Account
from marlaas_worker.rollout.engine_meter import EngineMeter
from marlaas_worker.rollout.load_retries import FIRST_WAIT_S, LONGEST_WAIT_S, Retries
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


async def test_free_places_go_to_tenants_by_weight_however_many_jobs_and_requests_one_has():
    limiter, served = RequestLimiter(1), Counter[str]()
    many = [account(f"job-{number}", "many") for number in range(20)]
    few = [account("job", "few", 3.0)]

    async def visit(who: Account) -> None:
        async with limiter.place(who, 10, 0) as place:
            await asyncio.sleep(0)
            place.cost = 10.0
            if limiter.num_waiting >= 60:
                served[who.tenant] += 1

    visits = [visit(who) for _ in range(4) for who in many]
    visits += [visit(who) for _ in range(60) for who in few]
    await asyncio.gather(*visits)
    assert abs(served["few"] / 3 - served["many"]) <= 2


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


async def test_each_agent_of_an_episode_is_open_by_itself():
    visits, episodes = Visits(), 0
    for agent in ("solver", "critic", "solver"):
        with visits.limiter.episodes.request(Account("a", 1.0, "job", agent), "a-1"):
            episodes = max(episodes, len(visits.limiter.episodes))
    assert episodes == 2
    visits.now = OPEN_S + 1
    visits.limiter.episodes.close_old()
    assert len(visits.limiter.episodes) == 0


async def test_requests_of_a_job_take_turns_by_agent():
    limiter, served = RequestLimiter(1), list[str]()

    async def visit(agent: str, job: str = "team") -> None:
        async with limiter.place(Account("a", 1.0, job, agent), 10, 0) as place:
            await asyncio.sleep(0)
            place.cost = 10.0
            served.append(agent or job)

    calls = [visit("floods") for _ in range(50)]
    await asyncio.gather(*calls, *(visit("calm") for _ in range(5)), *(visit("", "other job") for _ in range(5)))
    assert Counter(served[:20]) == {"floods": 10, "calm": 5, "other job": 5}, served[:20]
    assert Counter(served[:10])["calm"] >= 2


def test_the_estimate_is_the_90th_percentile_of_recent_outputs_and_at_first_the_maximum():
    limiter = RequestLimiter(1)
    assert limiter.outputs.expected_tokens("job", 128) == 128
    for num_tokens in range(1, 11):
        limiter.outputs.note("job", num_tokens)
    assert limiter.outputs.expected_tokens("job", 128) == 10
    assert limiter.outputs.expected_tokens("job", 4) == 4


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
    async with asyncio.timeout(10), limiter.place(account("after all"), 1, 0):
        pass
    assert limiter.num_waiting == 0


def test_shares_of_the_engines_time_add_up_to_the_time_it_was_busy():
    meter = EngineMeter()
    a = meter.enter(10.0)
    b = meter.enter(12.0)
    meter.leave(a, "one", 16.0)
    meter.leave(b, "two", 17.0)
    meter.advance(100.0)
    c = meter.enter(100.0)
    meter.leave(c, "one", 101.0)
    assert meter.busy_s == pytest.approx(8.0)
    assert meter.job_engine_s == pytest.approx({"one": 2.0 + 2.0 + 1.0, "two": 2.0 + 1.0})


@pytest.mark.parametrize(
    "error",
    [
        Retryable("away"),
        BlobRefused("token expired"),
        BusRefused("no permission"),
        RuntimeError("no thread"),
        OSError(),
    ],
)
def test_what_may_succeed_later_is_tried_again_ever_more_rarely(error):
    retries = Retries()
    waits = []
    for _ in range(12):
        failure = retries.failed("v1", error, 100.0)
        waits.append(failure.retry_at - 100.0)
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert not retries.may_try("v1", 109.0)
    assert retries.may_try("v1", 110.1)
    assert retries.next_in_s(["v0", "v1"], 109.0) == pytest.approx(1.0)
    retries.succeeded("v1")
    assert retries.next_in_s(["v1"], 109.0) is None


@pytest.mark.parametrize("error", [Permanent("corrupt"), KeyError("adapter_model.safetensors")])
def test_what_never_succeeds_is_refused_until_everything_begins_anew(error):
    retries = Retries()
    assert retries.failed("v1", error, 0.0).retry_at is None
    assert not retries.may_try("v1", 1e9)
    assert retries.next_in_s(["v1"], 0.0) is None
    retries.clear()
    assert retries.may_try("v1", 0.0)

"""Places in the engine: who is next, episodes, the room that requests reserve, totals of jobs and tenants, and failures."""

import asyncio
import contextlib
import math
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tests.tables import rows

from marlaas_api.blobs import BlobRefused
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.rollout.request_limiter import (
    BLOCK_TOKENS,
    OPEN_S,
    Account,
    KvBudget,
    Place,
    RequestLimiter,
)
from marlaas_worker.rollout.served_jobs import GONE_S, Failures, RecentOutputs, ServedJobs
from marlaas_worker.rollout.slots import ProvenVersions, VersionState
from marlaas_worker.rollout.supervised_engine import (
    MAX_ENGINE_FAILURES,
    DecodeTime,
    EngineFailures,
    EngineMeter,
    recent_tokens,
)
from marlaas_worker.rollout.versions import FIRST_WAIT_S, LONGEST_WAIT_S, failed_load


def account(job, tenant="team-a", weight=1.0):
    return Account(tenant, weight, job)


async def enter(limiter, entered, name, until, num_tokens=1):
    """Take a place as a job of this name, note it, and keep it until then."""
    async with limiter.place(account(name), num_tokens, 0, num_tokens):
        entered.append(name)
        await until.wait()


async def test_no_more_requests_enter_than_the_batch_and_the_cache_hold_and_a_request_costs_what_its_holder_says():
    limiter, inside, most = RequestLimiter(3, kv_tokens=128), Counter(), Counter()

    async def visit(job, num_tokens):
        async with limiter.place(account(job), 5, 0, num_tokens) as place:
            inside.update(requests=1, tokens=num_tokens)
            most.update({name: max(0, value - most[name]) for name, value in inside.items()})
            assert limiter.budget.num_reserved <= 128
            await asyncio.sleep(0)
            inside.subtract(requests=1, tokens=num_tokens)
            place.cost = 50.0

    with limiter.episodes.request(account("a"), "a-1"):
        with contextlib.suppress(RuntimeError):
            async with limiter.place(account("a"), 5, 0):
                raise RuntimeError("the engine refused it")
        assert limiter.usage("team-a") == 0, "and not the estimate"
        await asyncio.gather(*(visit(f"job-{number % 4}", 32 * (1 + number % 2)) for number in range(40)))
        assert limiter.usage("team-a") == 40 * 50
    assert most == {"requests": 3, "tokens": 128}
    assert (limiter.num_waiting, limiter.budget.num_reserved) == (0, 0)


async def test_an_episode_is_open_while_its_request_waits_and_for_a_while_after_its_last_request_has_ended():
    now = [0.0]
    limiter = RequestLimiter(1, clock=lambda: now[0])

    async def visit(tenant, episode, cost, takes_s=0.0):
        who = account("job", tenant)
        with limiter.episodes.request(who, episode):
            before = limiter.usage(tenant)
            async with limiter.place(who, 1, 0) as place:
                now[0] += takes_s
                place.cost = cost
        return before

    await visit("a", "a-1", 1.0, takes_s=2 * OPEN_S)
    for number in range(3):
        await visit("b", f"b-{number}", 100.0)
    now[0] += OPEN_S - 1
    assert await visit("a", "a-1", 0.0) == 1, "its episode waited for a tool, and keeps its credit"
    now[0] += OPEN_S + 1
    await visit("b", "b-4", 100.0)
    assert await visit("a", "a-2", 0.0) == 401, "lifted to the usage of the active tenant"
    with limiter.episodes.request(account("job", "c"), "c-1"):  # it waits for its version
        lifted = limiter.usage("c")
        for number in range(3):
            now[0] += 2 * OPEN_S
            await visit("b", f"b-{number}", 100.0)
        assert limiter.usage("c") == lifted
        assert len(limiter.episodes) == 2, "those that ended long ago are closed"


async def test_a_place_whose_owner_gave_up_goes_to_the_next():
    limiter, entered, leave = RequestLimiter(1), list[str](), asyncio.Event()
    names = ("first", "gone while waiting", "gone when called", "last")
    visits = [asyncio.ensure_future(enter(limiter, entered, name, leave)) for name in names]
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


async def test_a_lone_request_waits_for_the_others_and_admits_none_until_it_ends_or_is_cancelled():
    limiter, seen = RequestLimiter(4), []
    first, lone = asyncio.Event(), asyncio.Event()

    async def run_alone():
        with limiter.episodes.request(account("job"), "episode"):
            async with limiter.alone(account("job")) as place:
                seen.append("lone")
                place.cost = 30.0
                await lone.wait()

    async with asyncio.TaskGroup() as group:
        for work in (enter(limiter, seen, "first", first), run_alone(), enter(limiter, seen, "later", first)):
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
    async with limiter.place(account("job"), 1, 0):
        gives_up = asyncio.create_task(run_alone())
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.wait({gives_up})
        async with limiter.place(account("job"), 1, 0):
            pass


async def test_a_request_queued_for_a_larger_cache_enters_the_empty_engine():
    """After a restart the engine may have fewer tokens than a queued request has reserved; it must not block the queue."""
    limiter, hold, entered = RequestLimiter(8, kv_tokens=512), asyncio.Event(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(enter(limiter, entered, "first", hold, 32))
        await asyncio.sleep(0)
        group.create_task(enter(limiter, entered, "large", hold, 512))
        await asyncio.sleep(0)
        limiter.set_kv_tokens(256)
        assert entered == ["first"]
        hold.set()
    assert entered == ["first", "large"]


def test_a_reservation_is_whole_blocks_within_the_budget_and_an_estimate_of_the_last_64_outputs():
    budget = KvBudget(1, 1000)
    assert [budget.size(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5000)] == [0, 32, 32, 64, 1000]
    budget.take(32)
    assert budget.room < 0, "there is no sequence left"
    budget.give_back(32)
    assert budget.room == math.inf
    outputs = RecentOutputs()
    for number in (*[900] * 64, *range(1, 65)):
        outputs.note(number)
    assert outputs.expected_tokens(1000) == 58
    assert outputs.expected_tokens(4) == 4
    assert RecentOutputs().expected_tokens(1000) == 1000


class Prompts:
    """Requests with prompts, of two tenants. inside: those that have a place, with what ends them and what begins them."""

    def __init__(self):
        self.limiter = RequestLimiter(100, kv_tokens=100_000)
        self.limiter.prefill.step_tokens = 100
        self.inside: dict[str, Place] = {}
        self.over = asyncio.Event()

    async def run(self, name, num_prompt):
        async with self.limiter.place(account("job", name[0]), num_prompt, 10, num_prompt + 10) as place:
            self.inside[name] = place
            await self.over.wait()

    async def ask(self, *names, num_prompt):
        tasks = [asyncio.create_task(self.run(name, num_prompt), name=name) for name in names]
        await self.settle()
        return tasks

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def begin(self, name):
        self.inside[name].begin()
        self.inside[name].begin()  # an engine may report the first token twice
        await self.settle()


async def test_prompts_of_one_tenant_wait_for_their_share_of_a_step_and_others_pass_them():
    prompts = Prompts()
    tasks = await prompts.ask("a0", "a1", num_prompt=90)
    assert sorted(prompts.inside) == ["a0", "a1"], "it is alone"
    tasks += await prompts.ask("b0", "b1", "b2", num_prompt=60)
    assert sorted(prompts.inside) == ["a0", "a1", "b0"], "each tenant has 100"
    tasks += await prompts.ask("a2", "a3", num_prompt=90)
    assert "a2" not in prompts.inside
    await prompts.begin("b0")
    assert sorted(prompts.inside) == ["a0", "a1", "b0", "b1"]
    await prompts.begin("a0")
    assert "a2" not in prompts.inside, "90 of 100 tokens are still computed"
    await prompts.begin("a1")
    assert "a2" in prompts.inside
    for task in tasks:  # requests that are cancelled, in the engine or not, leave nothing behind
        task.cancel()
    await asyncio.wait(tasks)
    assert prompts.limiter.prefill._present == {}
    assert (prompts.limiter.num_waiting, prompts.limiter.budget.num_reserved) == (0, 0)


def test_shares_of_the_engines_time_add_up_to_the_time_it_was_busy():
    meter = EngineMeter()
    a = meter.enter(10.0)
    b = meter.enter(12.0)
    assert meter.leave(a, 16.0) == pytest.approx(2.0 + 2.0)
    assert meter.leave(b, 17.0) == pytest.approx(2.0 + 1.0)
    meter.advance(100.0)
    c = meter.enter(100.0)
    assert meter.leave(c, 101.0) == pytest.approx(1.0)
    assert meter.busy_s == pytest.approx(8.0)


def test_recent_tokens_count_half_after_a_minute_and_tell_the_tokens_of_unfinished_generations():
    recent = recent_tokens()
    recent.add({"a": 100}, 0.0)
    recent.add({"b": 8, "a": 10}, 60.0)
    assert recent.at(60.0) == {"a": 60.0, "b": 8.0}
    assert recent.at(300.0) == {"a": 3.75}
    decode = DecodeTime()
    assert decode.tokens_in(0.0, 100) == 1
    for _ in range(200):
        decode.note(5.0, 50)
        decode.note(0.0, 0)
    assert decode.tokens_in(0.95, 100) == 10
    assert decode.tokens_in(60.0, 100) == 100


def test_everything_of_a_job_is_dropped_when_its_document_has_been_gone_for_a_minute():
    jobs = ServedJobs()
    for present, used, (seconds, times), expired in rows(__file__, "gone_jobs"):
        for uid in used:
            jobs.of(job_ref(uid)).pins.put(("policy", f"{uid}-t0"), 1, 100)
        dropped = jobs.drop_gone({job_ref(uid) for uid in present}, seconds + times * GONE_S)
        assert {job.ref.uid for job in dropped} == set(expired), (seconds, times)
        assert jobs.bounds.pins.num_bytes == 100 * len(jobs)
    assert {job.ref.uid for job in jobs} == {"b"}


def job_ref(uid):
    return JobRef("team-a", "sums", uid)


def test_every_version_counts_for_its_agent_from_its_load_until_its_slot_is_free_and_a_job_that_is_gone_leaves_nothing():
    jobs = ServedJobs()
    proven = ProvenVersions(9, count(1), jobs)

    def version(uid, number, agent="policy"):
        return proven.version(AgentRef(job_ref(uid), agent).adapter(number))

    def totals(now):
        return {job.ref.uid: job.slot_s(now) for job in jobs}

    for uid, number, agent, now in rows(__file__, "loaded_versions"):
        proven.begin(version(uid, number, agent), Path("nowhere"), now)
    assert totals(14.0) == {"a": {"policy": 6.0, "critic": 1.5}, "b": {"policy": 1.0}}
    for now in (15.0, 99.0):
        proven.remove(version("a", 1), VersionState.UNLOADING, now)
    assert totals(16.0) == {"a": {"policy": 9.0, "critic": 3.5}, "b": {"policy": 3.0}}
    proven.clear(17.0)
    assert totals(20.0) == {"a": {"policy": 10.0, "critic": 4.5}, "b": {"policy": 4.0}}
    proven.begin(version("a", 2), Path("nowhere"), 25.0)
    for served, now in (("b", 26.0), ("a", 30.0)):
        for one in proven.resident.values():
            one.charge_slot(one.agent.ref.job == job_ref(served), now)
    assert totals(32.0)["a"] == {"policy": 13.0, "critic": 4.5}, "nobody pays for what an idle slot still holds"
    for now in (32.0, 32.0 + GONE_S):
        jobs.drop_gone({job_ref("b")}, now)
    assert totals(34.0) == {"b": {"policy": 4.0}}


PROMPT = np.array([1, 2], np.int32)
PASSING = [Retryable("away"), BlobRefused("expired"), BusRefused("no permission"), RuntimeError("no thread"), OSError()]


@pytest.mark.parametrize("error", PASSING)
def test_a_load_that_may_succeed_later_is_tried_again_ever_more_rarely(error):
    failures = [failed_load(None, error, 100.0)]
    for _ in range(11):
        failures.append(failed_load(failures[-1], error, 100.0))
    waits = [failure.retry_at - 100.0 for failure in failures]
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert [failures[-1].may_try(now) for now in (109.0, 110.1)] == [False, True]


@pytest.mark.parametrize("error", [Permanent("corrupt"), KeyError("adapter_model.safetensors")])
def test_a_load_that_never_succeeds_is_refused_until_everything_begins_anew(error):
    version = ProvenVersions(1, count(1), ServedJobs()).version(AgentRef(job_ref("a"), "policy").adapter(1))
    version.failure = failed_load(None, error, 0.0)
    assert (version.failure.retry_at, version.may_load(1e9)) == (None, False)
    version.restart(0.0)
    assert version.may_load(0.0)


def test_a_request_that_fails_by_its_own_seed_counts_its_failures_although_its_prompt_is_generated_by_others():
    failures, own, job = EngineFailures(), Failures(), ServedJobs().of(job_ref("uid"))
    for number in range(MAX_ENGINE_FAILURES):
        known = failures.of(job, PROMPT, own)
        assert known.number == number
        own = failures.note(job, PROMPT, known, own, f"death {number}")
        failures.generated(job, PROMPT)
    found = failures.of(job, PROMPT, own)
    verdict = failures.verdict(job, PROMPT, found, "e.0")
    assert (found.number, verdict.is_sure) == (MAX_ENGINE_FAILURES, True)
    text = "the engine failed 3 times while it ran the prompt of turn e.0; last: death 2; change the prompt, or ask"
    assert str(verdict).startswith(text)


def test_without_another_generation_the_prompt_may_not_be_the_cause_and_is_run_once_more():
    failures, own, job = EngineFailures(), Failures(), ServedJobs().of(job_ref("uid"))
    for _ in range(MAX_ENGINE_FAILURES):
        own = failures.note(job, PROMPT, failures.of(job, PROMPT, own), own, "died")
    assert not failures.verdict(job, PROMPT, own, "e.0").is_sure
    assert failures.of(job, PROMPT, Failures()).number == MAX_ENGINE_FAILURES - 1
    failures.generated(job, PROMPT)
    assert failures.of(job, PROMPT, Failures()).number == 0

"""A request that ends the engine: whom it takes along, how often, and what becomes of it; and engines that stall."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from marlaas_api.messages import ReplyPhase
from marlaas_api.names import episode_id
from marlaas_worker.rollout import supervised_engine
from marlaas_worker.rollout.accounts import Account
from marlaas_worker.rollout.engine import EngineDown
from marlaas_worker.rollout.request_limiter import RequestLimiter


async def answer(harness: Any, request: Any) -> Any:
    """Ask, and return the result or failure; a heartbeat may arrive after it."""
    async with harness.asking(request) as asked:
        await asked.end()
        return next(one for one in asked.heard if one.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED))


@pytest.mark.parametrize("places", [64, 2], ids=["places for all", "two places"])
async def test_a_prompt_that_always_ends_the_engine_does_so_three_times_in_all_and_hits_every_other_at_most_once(
    harness: Any, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(supervised_engine, "RESTART_BACKOFF_S", (0.0,))
    engine = make_engine(limits={"max_num_seqs": places})
    inside, deaths = Counter[str](), list[set[str]]()
    generate = engine.generate

    async def fatal(request: str, adapter: Any, prompt_ids: Any, *arguments: Any) -> Any:
        text = "".join(map(chr, prompt_ids))
        inside[text] += 1
        down = engine._down
        try:
            await asyncio.sleep(0.02)
            if down.done():
                raise EngineDown(down.result())
            if "poison" in text:
                deaths.append(set(+inside))
                engine.die("poison")
            return await generate(request, adapter, prompt_ids, *arguments)
        finally:
            inside[text] -= 1

    engine.generate = fatal
    await harness.replica(engine=engine)
    sender, other = await harness.job("sender"), await harness.job("other")
    for job in (sender, other):
        await harness.ask(job.request(index=50))  # until the replica listens
    members = [sender.request(member=member, append="poison", deadline_s=300.0) for member in range(3)]
    others = [other.request(index=index, append=f"good {index}", deadline_s=300.0) for index in range(10)]
    replies = await asyncio.gather(*(answer(harness, request) for request in (*members, *others)))
    bad, good = replies[:3], replies[3:]
    bad.append(
        await answer(
            harness, sender.request(episode=episode_id(members[0].group, 0, 2), append="poison", deadline_s=300.0)
        )
    )
    assert {(reply.phase, reply.retryable) for reply in bad} == {(ReplyPhase.FAILED, False)}
    assert bad[-1].stops_engine, "others were generated meanwhile"
    assert all("the engine failed 3 times while it ran the prompt of turn" in reply.error for reply in bad)
    assert [reply.phase for reply in good] == [ReplyPhase.RESULT] * 10, [reply.error for reply in good if reply.error]
    assert len(deaths) <= 3 + sum(not reply.stops_engine for reply in bad)
    companions = Counter(text for death in deaths for text in death if "poison" not in text)
    assert max(companions.values(), default=0) <= 1
    assert deaths[-1] == {text for text in deaths[-1] if "poison" in text}, "it was alone"


async def test_a_request_that_waits_for_its_version_after_a_failure_delays_no_other_retry(
    harness: Any, shut_engine: Any
) -> None:
    await harness.replica(engine=shut_engine)
    waiting, other = await harness.job("waiting"), await harness.job("other")
    load, num_hanging = shut_engine.load, 0

    async def hang(adapter: Any) -> Any:
        nonlocal num_hanging
        if adapter.name == waiting.adapter(0).engine_name and shut_engine.starts > 1:
            num_hanging += 1
            await asyncio.Event().wait()
        return await load(adapter)

    shut_engine.load = hang
    async with harness.asking(waiting.request()) as first:
        await harness.until(lambda: len(shut_engine.calls) == 1)
        async with harness.asking(other.request()) as second:
            await harness.until(lambda: len(shut_engine.calls) == 2)
            shut_engine.open.set()
            shut_engine.die()
            await harness.until(lambda: num_hanging == 1 and second.over.is_set())
            assert second.heard[-1].phase is ReplyPhase.RESULT
        assert not first.over.is_set()


async def test_a_lone_request_waits_for_the_others_and_admits_none_until_it_ends() -> None:
    limiter, seen = RequestLimiter(4), list[str]()
    account = Account("team-a", 1.0, "job")
    first, lone = asyncio.Event(), asyncio.Event()

    async def run(name: str, until: asyncio.Event) -> None:
        async with limiter.place(account, 1, 0):
            seen.append(name)
            await until.wait()

    async def run_alone() -> None:
        with limiter.episodes.request(account, "episode"):
            async with limiter.alone(account) as place:
                seen.append("lone")
                place.cost = 30.0
                await lone.wait()

    async with asyncio.TaskGroup() as group:
        for name, work in (("first", run("first", first)), ("lone", run_alone()), ("later", run("later", first))):
            group.create_task(work, name=name)
            await asyncio.sleep(0)
        assert seen == ["first"]
        first.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == ["first", "lone"]
        lone.set()
    assert seen == ["first", "lone", "later"]
    assert limiter.usage("team-a") == 30.0


async def test_a_lone_request_that_is_cancelled_lets_the_others_in() -> None:
    limiter = RequestLimiter(4)
    account = Account("team-a", 1.0, "job")

    async def run_alone() -> None:
        async with limiter.alone(account):
            await asyncio.Event().wait()

    async with limiter.place(account, 1, 0):
        lone = asyncio.create_task(run_alone())
        await asyncio.sleep(0)
        lone.cancel()
        await asyncio.wait({lone})
        async with limiter.place(account, 1, 0):
            pass

"""An engine that fails: its requests, its restarts and its self-test; and prompts that end it each time."""

import asyncio
import contextlib
from collections import Counter

import pytest
from tests.rollout.service.scripted import CharacterTokenizer

from marlaas_api.errors import Permanent
from marlaas_api.messages import ReplyPhase
from marlaas_api.names import episode_id
from marlaas_worker.rollout import supervised_engine
from marlaas_worker.rollout.engine import EngineDown
from marlaas_worker.rollout.self_test import SelfTestFailed
from marlaas_worker.rollout.service import serve_engine
from marlaas_worker.rollout.supervised_engine import SupervisedEngine


async def ended(replica, error, words):
    with pytest.raises(BaseExceptionGroup) as found:
        await replica.task
    assert found.group_contains(error, match=words, depth=None)


async def test_requests_outlive_the_engine_cause_one_restart_and_are_charged_for_both_generations(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    asked = [asyncio.ensure_future(harness.result(job.request(index=index))) for index in range(8)]
    await harness.until(lambda: len(shut_engine.calls) == 8)
    shut_engine.open.set()
    shut_engine.die("they killed it")
    assert {reply.text for reply in await asyncio.gather(*asked)} == {"yes"}
    assert shut_engine.starts == 2
    assert shut_engine.loads == [job.adapter(0).engine_name] * 2
    report = await harness.report("rollout-0", lambda report: report.restarts == 1 and len(report.verified) > 0)
    assert (report.ready, report.verified) == (True, (job.adapter(0).engine_name,))
    least = 8 * (
        2 * len(shut_engine.calls[0].prompt_ids) + 4 + 1
    )  # a reply of 4 tokens, and at least one that was lost
    await harness.report("rollout-0", lambda report: report.tenant_tokens.get("team", 0) >= least)
    assert "they killed it" in (await harness.emitted(job.document, "EngineRestarted")).message


async def test_a_report_of_a_failure_counts_only_for_the_incarnation_that_failed(make_engine):
    async def passes(engine):
        assert engine

    failures: list[str] = []
    engine = SupervisedEngine(make_engine(), passes, failures.append, lambda: None)
    await engine.start()
    for incarnation, reason in ((0, "first"), (0, "first again"), (1, "it is down already")):
        engine.report(incarnation, reason)
    await engine.restart()
    engine.report(0, "first, by a call that ended late")
    assert (failures, engine.up) == (["first"], True)
    engine.report(1, "second")
    assert (failures, engine.up) == (["first", "second"], False)


@pytest.mark.parametrize("places", [64, 2], ids=["places for all", "two places"])
async def test_a_prompt_that_always_ends_the_engine_does_so_thrice_and_hits_others_once(harness, make_engine, places):
    engine = make_engine(limits={"max_num_seqs": places})
    inside, deaths, generate = Counter(), [], engine.generate

    async def fatal(request, adapter, prompt_ids, *arguments):
        text, down = "".join(map(chr, prompt_ids)), engine._down
        inside[text] += 1
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
    poison = {"append": "poison", "deadline_s": 300.0}
    members = [sender.request(member=member, **poison) for member in range(3)]
    others = [other.request(index=index, append=f"good {index}", deadline_s=300.0) for index in range(10)]
    replies = await asyncio.gather(*(harness.ask(request) for request in (*members, *others)))
    bad, good = replies[:3], replies[3:]
    bad.append(await harness.ask(sender.request(episode=episode_id(members[0].group, 0, 2), **poison)))
    assert {(reply.phase, reply.retryable) for reply in bad} == {(ReplyPhase.FAILED, False)}
    assert bad[-1].stops_engine, "others were generated meanwhile"
    assert all("the engine failed 3 times while it ran the prompt of turn" in reply.error for reply in bad)
    assert [reply.phase for reply in good] == [ReplyPhase.RESULT] * 10, [reply.error for reply in good if reply.error]
    assert len(deaths) <= 3 + sum(not reply.stops_engine for reply in bad)
    companions = Counter(text for death in deaths for text in death if "poison" not in text)
    assert max(companions.values(), default=0) <= 1
    assert all("poison" in text for text in deaths[-1]), "it was alone"


async def test_while_its_engine_is_down_a_replica_leaves_episodes_to_others(harness, make_engine):
    engine = make_engine()
    replica = await harness.replica("rollout-0", engine)
    await harness.replica("rollout-1")
    job = await harness.job()
    engine.restart = asyncio.Event().wait
    engine.die()
    await harness.ask(job.request(index=50, deadline_s=0.05), of="rollout-0")
    await harness.report("rollout-0", lambda report: not report.ready)
    for index in range(6):
        assert (await harness.result(job.request(index=index))).replica == "rollout-1"
    assert replica.engine.calls == []


async def test_an_engine_that_does_not_come_back_ends_the_role_with_its_words(harness, make_engine):
    async def refuses():
        raise Permanent("no memory")

    engine = make_engine(deaths=1)
    replica, job = await harness.serving(engine)
    engine.restart = refuses
    begun = asyncio.get_running_loop().time()
    async with harness.asking(job.request()):
        await ended(replica, Permanent, "no memory")
    assert asyncio.get_running_loop().time() - begun >= sum(supervised_engine.RESTART_BACKOFF_S)


@pytest.mark.parametrize("incarnation", [1, 2])
async def test_an_engine_that_fails_its_self_test_never_serves_and_ends_the_role(harness, make_engine, incarnation):
    """It is not started again within the process: the same engine would fail again, and nobody would hear of it."""
    engine = make_engine(applies=incarnation == 2)
    await harness.calibrate(engine)
    replica = await harness.begin("rollout-0", engine)
    async with contextlib.AsyncExitStack() as stack:
        if incarnation == 2:
            await harness.report("rollout-0", lambda report: report.ready)
            engine.applies = False
            engine.die()
            await stack.enter_async_context(harness.asking((await harness.job()).request()))  # the first to notice
        await ended(replica, SelfTestFailed, r"slot 1 of 4: .* it is not applied")
    assert (engine.starts, engine.calls) == (incarnation, [])


async def test_an_engine_waits_for_its_calibration_and_says_so(harness, make_engine):
    engine = make_engine()
    await harness.begin("rollout-0", engine)

    async def says(words):
        found = await harness.report("rollout-0", lambda report: words in report.reason)
        assert (found.ready, found.probe_tolerance) == (False, 0.0)

    await says("waiting for a trainer of pool pool to calibrate the base model for float32")
    await harness.calibrate(engine, dtype="bfloat16")
    await says("has calibrated for bfloat16, this engine computes in float32; set the pool's rollout.dtype")
    await harness.calibrate(engine, base="another")
    await says("trainer trainer-0 of pool pool has base model another, this engine base")
    await harness.calibrate(engine)
    found = await harness.report("rollout-0", lambda report: report.ready)
    assert (found.reason, found.probe_tolerance) == ("", 1e-4)
    assert (await harness.ask((await harness.job()).request())).text == "yes"


async def test_a_role_told_to_stop_while_its_engine_starts_stops(harness, make_engine):
    engine = make_engine()
    engine.start = asyncio.Event().wait
    context = await harness.context("rollout-0")
    context.stop.set()
    await serve_engine(context, "pool", CharacterTokenizer(), engine)  # its first report reads the tokenizer

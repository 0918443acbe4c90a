import asyncio

import pytest

from marlaas_api.errors import Permanent
from marlaas_api.messages import ReplyPhase, StopReason
from marlaas_worker.rollout import generation, requests, supervised_engine
from marlaas_worker.rollout.engine import EngineDown
from marlaas_worker.rollout.self_test import SelfTestFailed
from marlaas_worker.rollout.service import serve_engine


async def test_requests_outlive_the_engine(harness, make_engine):
    engine = make_engine(deaths=1)
    _, job = await harness.serving(engine)
    reply = await harness.ask(job.request())
    assert (reply.phase, reply.text) == (ReplyPhase.RESULT, "yes")
    assert engine.starts == 2
    assert engine.loads == [job.adapter(0).engine_name] * 2
    report = await harness.report("rollout-0", lambda report: report.restarts == 1 and len(report.verified) > 0)
    assert (report.ready, report.verified) == (True, (job.adapter(0).engine_name,))
    event = await harness.emitted(job.document, "EngineRestarted")
    assert "this request killed it" in event.message


async def test_many_requests_that_see_one_death_cause_one_restart(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    asked = [asyncio.ensure_future(harness.ask(job.request(index=index))) for index in range(8)]
    while len(shut_engine.calls) < 8:
        shut_engine.called.clear()
        await shut_engine.called.wait()
    shut_engine.open.set()
    shut_engine.die()
    assert all(reply.phase is ReplyPhase.RESULT for reply in await asyncio.gather(*asked))
    assert shut_engine.starts == 2


async def test_a_request_under_which_the_engine_always_dies_is_refused(harness, make_engine, monkeypatch):
    monkeypatch.setattr(supervised_engine, "RESTART_BACKOFF_S", (0.0,))
    engine = make_engine(deaths=3)
    _, job = await harness.serving(engine)
    generate = engine.generate

    async def beside_one_beyond_the_context(*arguments):
        if len(engine.calls) == 1:
            assert (await harness.ask(job.request(index=1, append="x" * 2000))).stop_reason is StopReason.CONTEXT
        return await generate(*arguments)

    engine.generate = beside_one_beyond_the_context
    reply = await harness.ask(job.request())
    assert (reply.phase, reply.retryable) == (ReplyPhase.FAILED, False)
    assert (
        reply.error
        == "the engine failed 3 times while it ran the prompt of turn uid1-t0-0-1.0; last: this request killed it"
    )
    assert len(engine.calls) == 3
    assert not reply.stops_engine, "the engine generated nothing else: it may fail for another reason"
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT


async def test_a_request_outside_the_engine_has_no_part_in_its_death(harness, make_engine, monkeypatch):
    monkeypatch.setattr(generation, "MAX_ENGINE_FAILURES", 1)
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.01)
    engine = make_engine(limits={"max_num_seqs": 1})
    engine.open.clear()
    _, job = await harness.serving(engine)
    async with harness.asking(job.request()) as inside:
        await engine.called.wait()
        async with harness.asking(job.request(index=1, append="another prompt")) as outside:
            await outside.until_it_says("it waited for a place in the engine")
            engine.die()
            assert "the engine failed 1 times" in (await inside.end()).error
            engine.open.set()
            assert (await outside.end()).phase is ReplyPhase.RESULT


async def test_an_idle_engine_that_hangs_is_noticed(harness, make_engine, monkeypatch):
    monkeypatch.setattr(supervised_engine, "HEALTH_CHECK_S", 0.01)
    engine = make_engine()
    _, job = await harness.serving(engine)
    await harness.verified("rollout-0", job.adapter(0))
    engine.die("hangs")
    await harness.report(
        "rollout-0", lambda report: report.restarts == 1 and job.adapter(0).engine_name in report.verified
    )
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT


async def test_nothing_is_loaded_if_the_engine_fails_again_before_the_loads_begin(harness, make_engine, roles):
    """The files of the versions that were lost with the first incarnation are removed first."""
    engine = make_engine()
    _, job = await harness.serving(engine)
    await harness.verified("rollout-0", job.adapter(0))
    role, failed, go_on = roles[0], asyncio.Event(), asyncio.Event()
    discard, restart = role._adapter_cache.discard, engine.restart

    async def wait_and_restart():
        await go_on.wait()
        await restart()

    async def discard_and_fail(adapter):
        await discard(adapter)
        if not failed.is_set():
            engine.restart = wait_and_restart
            role._engine.report(1, "it fails again")
            failed.set()

    role._adapter_cache.discard = discard_and_fail
    role._engine.report(0, "it fails")
    await failed.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert role._versions._resident == {}
    go_on.set()
    await harness.report("rollout-0", lambda report: report.restarts == 2 and len(report.verified) > 0)


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
        assert (await harness.ask(job.request(index=index))).replica == "rollout-1"
    assert replica.engine.calls == []


async def test_an_engine_that_does_not_come_back_ends_the_role_with_its_words(harness, make_engine, monkeypatch):
    monkeypatch.setattr(supervised_engine, "RESTART_BACKOFF_S", (0.0, 0.0))

    async def refuses() -> None:
        raise Permanent("no memory")

    engine = make_engine(deaths=1)
    replica, job = await harness.serving(engine)
    engine.restart = refuses
    async with harness.asking(job.request()):
        with pytest.raises(BaseExceptionGroup) as ended:
            await replica.task
    assert ended.group_contains(Permanent, match="no memory", depth=None)


@pytest.mark.parametrize("incarnation", ["first", "second"])
async def test_an_engine_that_fails_its_self_test_never_serves_and_ends_the_role(harness, make_engine, incarnation):
    """It is not started again within the process: the same engine would fail again, and nobody would hear of it."""
    engine = make_engine(applies=incarnation == "second")
    await harness.calibrate(engine)
    replica = await harness.begin("rollout-0", engine)
    if incarnation == "second":
        await harness.report("rollout-0", lambda report: report.ready)
        engine.applies = False
        engine.die()
        job = await harness.job()
        async with harness.asking(job.request()):  # the first to notice
            with pytest.raises(BaseExceptionGroup) as ended:
                await replica.task
    else:
        with pytest.raises(BaseExceptionGroup) as ended:
            await replica.task
    assert ended.group_contains(SelfTestFailed, match=r"slot 1 of 4: .* it is not applied", depth=None)
    assert engine.starts == (1 if incarnation == "first" else 2)
    assert engine.calls == []


@pytest.mark.parametrize("incarnation", [1, 2])
async def test_an_engine_that_hangs_in_its_self_test_is_noticed(harness, make_engine, monkeypatch, incarnation):
    """The first one ends the role, which is restarted; a later one is started again."""
    monkeypatch.setattr(supervised_engine, "HEALTH_CHECK_S", 0.01)
    monkeypatch.setattr(supervised_engine, "RESTART_BACKOFF_S", (0.0, 0.0))
    engine, hangs = make_engine(), asyncio.Event()
    score, healthy = engine.score, engine.healthy

    async def hang(*arguments):
        if engine.starts == incarnation:
            hangs.set()
            await engine._down
        return await score(*arguments)

    async def notice():
        if hangs.is_set() and engine.starts == incarnation:
            engine.die("hangs")
        return await healthy()

    engine.score, engine.healthy = hang, notice
    await harness.calibrate(engine)
    replica = await harness.begin("rollout-0", engine)
    if incarnation == 1:
        await harness.until(replica.task.done)
        with pytest.raises(BaseExceptionGroup) as ended:
            await replica.task
        assert ended.group_contains(EngineDown, match="hangs", depth=None)
    else:
        await harness.report("rollout-0", lambda report: report.ready)
        engine.die()
        await harness.report("rollout-0", lambda report: report.restarts == 1)
    assert engine.starts == (1 if incarnation == 1 else 3)


async def test_an_engine_waits_for_its_calibration_and_says_so(harness, make_engine):
    engine = make_engine()
    await harness.begin("rollout-0", engine)

    async def says(words: str) -> None:
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
    await serve_engine(context, "pool", None, engine)  # type: ignore[arg-type]

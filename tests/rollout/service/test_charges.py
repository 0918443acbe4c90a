"""What requests are charged, the CPU share of the engine, and that nothing is left of jobs that are gone."""

import asyncio
import contextlib

import pytest
from tests.harness import Harness
from tests.rollout.service.scripted import LIMITS

from marlaas_api import subjects
from marlaas_api.bucket_cache import REREAD_S
from marlaas_api.cpu_shares import COMPUTE_SHARE, FULL_SHARE
from marlaas_api.messages import ReplicaReport, ReplyPhase
from marlaas_api.names import PREEMPTION_STRIDE, episode_id
from marlaas_worker.rollout import service
from marlaas_worker.rollout.request_limiter import OPEN_S
from marlaas_worker.rollout.served_jobs import GONE_S


@pytest.mark.parametrize("preempted", [None, "before", "while it runs"])
async def test_a_cancelled_generation_is_charged_prompt_and_estimated_output(harness, shut_engine, roles, preempted):
    """It counts as preempted if its job was preempted while it ran, even if that is admitted again before its sandbox cancels."""
    _, job = await harness.serving(shut_engine, rollout={"maxTokens": 50})
    shut_engine.queues = preempted is None

    async def preempt(when):
        if preempted == when:
            for admitted in (False, True):
                await Harness.admit(harness, job.document, admitted=admitted, num_preemptions=1)
            await harness.until(lambda: roles[0]._policies.num_preemptions(job.document.ref) == 1)

    await preempt("before")
    async with harness.asking(job.request(), of="rollout-0"):
        await shut_engine.called.wait()
        await preempt("while it runs")
        async with harness.asking(job.cancel(), of="rollout-0"):
            found = await harness.report("rollout-0", lambda one: one.num_running == 0 and one.tenant_tokens)
    tokens = found.job_tokens[job.uid]
    assert tokens == 0 if preempted is None else 1 <= tokens <= 50, "none before its first token"
    assert found.tenant_tokens == {"team": len(shut_engine.calls[0].prompt_ids) + tokens}
    cut = [found.job_tokens, found.job_engine_s] if preempted == "while it runs" else [{}, {}]
    assert [found.job_preempted_tokens, found.job_preempted_engine_s] == cut


async def test_a_turn_tells_how_often_its_job_was_preempted_even_if_the_watch_is_slow(harness, roles, monkeypatch):
    _, job = await harness.serving()
    request = job.request()
    later = request.model_copy(update={"episode": episode_id(request.group, 0, PREEMPTION_STRIDE + 1)})
    feigned = request.model_copy(update={"episode": episode_id(request.group, 0, 7 * PREEMPTION_STRIDE)})
    assert (await harness.ask(request)).phase is ReplyPhase.RESULT
    monkeypatch.setattr(roles[0]._policies._progress, "note", lambda entry: None)  # the watch is slow
    await Harness.admit(harness, job.document, num_preemptions=1)
    for one, number in ((request, 0), (later, 1), (feigned, 1)):
        assert (await harness.ask(one)).phase is ReplyPhase.RESULT
        assert (await harness.turn(one)).num_preemptions == number


async def test_use_on_another_replica_is_charged_here(harness, shut_engine, roles):
    _, job = await harness.serving(shut_engine)
    key = subjects.replica_key("rollout", "pool", "other")
    other = ReplicaReport(role="rollout", pool="pool", replica="other", ready=False, tenant_tokens={"team": 5000})

    def usage():
        return float(roles[0]._engine.limiter.usage("team"))

    async with harness.asking(job.request(), of="rollout-0"):
        await shut_engine.called.wait()
        before = usage()
        for total in (5000, 5700, 5700, 20, 50):  # then it is restarted
            await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": total}}))
        await harness.until(lambda: usage() == before + 700 + 30)
        await (await harness.bus.bucket(subjects.REPLICAS)).delete(key)
        await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": 9000}}))
        await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": 9001}}))
        await harness.until(lambda: usage() == before + 731)
        shut_engine.open.set()


async def test_the_engine_gets_a_full_share_while_a_request_waits_for_a_slot(harness, shut_engine, monkeypatch):
    shares: list[int] = []
    monkeypatch.setattr(service, "set_share", lambda pid, niceness: shares.append(niceness))
    harness.shares_cpu = True
    _, first = await harness.serving(shut_engine)
    jobs = [first, *[await harness.job(f"job-{number}") for number in range(LIMITS.slots)]]
    async with contextlib.AsyncExitStack() as asked:
        for job in jobs[:-1]:
            await asked.enter_async_context(harness.asking(job.request()))
        await harness.until(lambda: len(shut_engine.calls) == LIMITS.slots)
        await harness.until(lambda: shares[-1] == COMPUTE_SHARE)
        await asked.enter_async_context(harness.asking(jobs[-1].request()))
        await harness.until(lambda: shares[-1] == FULL_SHARE)
        shut_engine.open.set()
        await harness.until(lambda: shares[-1] == COMPUTE_SHARE)


NUM_JOBS, AT_ONCE = 40, 10


def sizes(role):
    """The number of entries of each map that has entries by job, version, group, episode or request."""
    engine, requests, proven, bounds = role._engine, role._requests, role._versions.proven, role._jobs.bounds
    of_maps = [role._jobs, engine.meter.tenant_tokens, engine.limiter.episodes, requests._characters, requests._active]
    of_maps += [proven.served, proven.waiting]
    of_caches = [bounds.pins, bounds.manifests, bounds.histories, bounds.answers, bounds.failures]
    return [*map(len, of_maps), *(bound.num_bytes for bound in of_caches)]


async def test_after_40_short_jobs_nothing_of_them_is_left(harness, make_engine, roles):
    """Memory is bounded by the jobs that exist: what belonged to a job is dropped when its document has been gone for a minute."""

    async def play(number):
        job = await harness.job(f"job-{number}")
        for turn in range(3):
            await harness.result(job.request(turn=turn))
        key = job.document.ref.key
        for bucket, name in ((subjects.POLICY, f"{key}.policy"), (subjects.PROGRESS, key), (subjects.JOBS, key)):
            await (await harness.bus.bucket(bucket)).delete(name)

    await harness.replica(engine=make_engine(limits={"slots": AT_ONCE}))
    for first in range(0, NUM_JOBS, AT_ONCE):
        await asyncio.gather(*(play(number) for number in range(first, first + AT_ONCE)))
    await asyncio.sleep(GONE_S + OPEN_S + 2 * REREAD_S)
    roles[0]._engine.limiter.episodes.close_old()  # as the next request would
    assert not any(sizes(roles[0])), sizes(roles[0])
    assert roles[0]._engine.limiter._queue._root.below == {}
    assert len(roles[0]._versions.proven.resident) <= AT_ONCE

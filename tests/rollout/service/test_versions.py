"""Which version serves a request: only proven ones, for a group the one to which it is pinned; and versions that lost their slot and come back."""

import asyncio

import pytest
from tests.killing import kill_at
from tests.tables import rows

from marlaas_api import failpoints, subjects
from marlaas_api.blobs import BlobRefused, BlobUnavailable
from marlaas_api.messages import ReplyPhase
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.rollout.adapter_cache import AdapterCache

# Versions 1 that must never be served, with the reason.


async def refused_by_the_engine(harness, engine, job):
    engine.refuse = "@v1"
    await harness.commit(job, 1)
    return "the engine does not like it"


async def with_corrupt_files(harness, engine, job):
    ref = await harness.publish(job, 1)
    name = next(name for name in harness.blobs.contents if "/v1/" in name and name.endswith(TENSORS_FILE))
    harness.blobs.contents[name] = harness.blobs.contents[name][:-1] + b"!"
    await harness.commit(job, 1, ref)
    return "sha256"


@pytest.mark.parametrize("spoil", [refused_by_the_engine, with_corrupt_files])
async def test_a_version_is_never_served(harness, spoil):
    replica, job = await harness.serving()
    await harness.verified("rollout-0", job.adapter(0))
    words = await spoil(harness, replica.engine, job)
    request = job.request(index=99)
    await harness.pin(request, 1)
    reply = await harness.failure(request, of=None)
    assert (words in reply.error, reply.retryable) == (True, False), reply.error
    event = await harness.emitted(job.document, "VersionRefused")
    assert event.message.endswith(reply.error.partition("is refused: ")[2])
    assert await harness.turn(request) is None
    assert job.adapter(1).engine_name not in {held.name for held in replica.engine._held}
    await harness.result(job.request())
    assert [call.adapter.name for call in replica.engine.calls] == [job.adapter(0).engine_name]


@pytest.mark.parametrize("failure", [BlobUnavailable("the store is away"), BlobRefused("its token has expired")])
async def test_a_version_whose_files_cannot_be_had_now_is_tried_again(harness, failure):
    _, job = await harness.serving()
    ref = await harness.publish(job, 1)
    await harness.verified("rollout-0", job.adapter(0))
    harness.blobs.failure = failure
    await harness.commit(job, 1, ref)
    request = job.request()
    await harness.pin(request, 1)
    explained = await harness.failure(job.request(member=1, deadline_s=0.2), of=None)
    assert (explained.retryable, str(failure) in explained.error) == (True, True)
    await harness.result(job.request(index=1))
    async with harness.asking(request) as asked:
        await asked.until(ReplyPhase.ACCEPTED)
        harness.blobs.failure = None
        assert (await asked.end()).phase is ReplyPhase.RESULT
    assert (await harness.turn(request)).version == 1


async def test_an_older_version_is_found_through_its_successors(harness, make_engine):
    engine = make_engine(limits={"slots": 2})
    job = await harness.job()
    for version in range(1, 5):
        await harness.commit(job, version)
    await harness.replica(engine=engine)
    request = job.request()
    await harness.pin(request, 1)
    await harness.result(request)
    assert (await harness.turn(request)).version == 1
    assert engine.calls[0].adapter.name == job.adapter(1).engine_name


async def test_a_version_that_is_pinned_before_its_commit_is_waited_for_outside_the_engine(harness, make_engine):
    """A failed load would be tried again only after a pause, and would have taken the slot of another version."""
    engine = make_engine(limits={"slots": 1, "max_num_seqs": 1, "kv_tokens": 32})
    await harness.replica(engine=engine)
    job = await harness.job()
    await harness.verified("rollout-0", job.adapter(0))
    request, before = job.request(), job.request(index=1)
    await harness.pin(request, 1)
    await harness.pin(before, 0)
    async with harness.asking(request) as asked:
        await asked.until_it_says("its trainer has not committed it yet")
        await harness.result(before)
        await harness.commit(job, 1)
        assert (await asked.end()).phase is ReplyPhase.RESULT
    assert [(await harness.turn(one)).version for one in (before, request)] == [0, 1]
    assert engine.loads == [job.adapter(version).engine_name for version in (0, 1)]


@pytest.mark.parametrize(("staleness", "refresh", "expected"), rows(__file__, "refreshed"))
async def test_a_group_keeps_its_first_version_unless_each_turn_refreshes_it(harness, staleness, refresh, expected):
    _, job = await harness.serving(training={"steps": 1, "maxStaleness": staleness}, rollout={"refresh": refresh})
    await harness.ask(job.request(turn=0))
    await harness.commit_verified(job, 1)
    event = await harness.emitted(job.document, "VersionVerified")
    assert (event.uid, event.role) == (job.uid, "rollout")
    later = [job.request(turn=1), job.request(member=3), job.request(index=1)]
    for request in later:
        await harness.ask(request)
    assert [(await harness.turn(request)).version for request in later] == expected


async def test_a_group_keeps_the_version_to_which_a_replica_pinned_it_before_it_was_killed(harness, monkeypatch):
    replica, job = await harness.serving()
    await harness.verified("rollout-0", job.adapter(0))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hook", None)  # `kill_at` sets it until the end of this block
        kill_at("rollout.pin.after_create")
        async with harness.asking(job.request()) as asked:
            await asyncio.wait([replica.task])
    assert not any(reply.phase is ReplyPhase.RESULT for reply in asked.heard)
    await replica.kill()
    assert await harness.turn(job.request()) is None
    await harness.commit(job, 1)
    await harness.replica("rollout-0")
    await harness.verified("rollout-0", job.adapter(1))
    for index in range(2):
        await harness.ask(job.request(index=index))
    assert [(await harness.turn(job.request(index=index))).version for index in range(2)] == [0, 1]


async def test_two_replicas_pin_a_group_to_one_version(harness, make_engine):
    engines = [make_engine(), make_engine(refuse="@v1")]
    for number, engine in enumerate(engines):
        await harness.replica(f"rollout-{number}", engine)
    job = await harness.job()
    await harness.verified("rollout-1", job.adapter(0))
    await harness.commit_verified(job, 1)
    await harness.ask(job.request(member=0), of="rollout-1")
    await harness.ask(job.request(member=1), of="rollout-0")
    assert [(await harness.turn(job.request(member=member))).version for member in (0, 1)] == [0, 0]


@pytest.mark.parametrize(("staleness", "token"), [(0, "t0"), (1, "e3v0")])
async def test_in_strict_mode_and_evaluations_only_the_orchestrators_pin_counts(harness, staleness, token):
    _, job = await harness.serving(training={"steps": 1, "maxStaleness": staleness})
    await harness.commit_verified(job, 1)
    group = f"{job.uid}-{token}"
    request = job.request(group=group, episode=f"{group}-0-1")
    unpinned = await harness.failure(request, of=None)
    assert (unpinned.retryable, unpinned.waits, "has no pin yet" in unpinned.error) == (True, False, True)
    assert await (await harness.bus.bucket(subjects.PINS)).entries() == []
    await harness.pin(request, 0)
    await harness.result(request)
    assert (await harness.turn(request)).version == 0


def count_scores(engine):
    scored: list[str] = []
    score = engine.score

    async def counting(adapter, ids):
        if not adapter.name.startswith("self-test."):
            scored.append(adapter.name)
        return await score(adapter, ids)

    engine.score = counting
    return scored


async def test_an_evicted_version_is_proven_by_its_digest_when_it_comes_back(harness, make_engine):
    twisted = []
    engine = make_engine(limits={"slots": 1}, twist=lambda folder: twisted[0] if twisted else folder)
    scored = count_scores(engine)
    replica = await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b")]
    for index in range(2):
        for job in jobs:
            await harness.result(job.request(index=index))
    names = [job.adapter(0).engine_name for job in jobs]
    assert (engine.loads, scored) == ([*names, *names], names)
    samples = {sample.name: sample.value for sample in replica.context.metrics.all_samples()}
    assert (samples["marlaas_rollout_loads_total"], samples["marlaas_rollout_reloads_total"]) == (4, 2)
    await harness.publish(jobs[0], 7)
    twisted.append(harness.scratch / "published" / jobs[0].adapter(7).engine_name)
    refused = await harness.failure(jobs[0].request(index=2))
    assert ("digest check failed" in refused.error, refused.retryable) == (True, False)


async def test_an_idle_engine_that_hangs_is_noticed_and_a_version_probed_again_after_its_restart(harness, make_engine):
    engine = make_engine()
    scored = count_scores(engine)
    _, job = await harness.serving(engine)
    name = job.adapter(0).engine_name
    await harness.verified("rollout-0", job.adapter(0))
    engine.die("hangs")
    await harness.report("rollout-0", lambda report: report.restarts == 1 and name in report.verified)
    await harness.result(job.request())
    assert scored == [name] * 2


async def test_a_version_that_is_asked_for_while_it_is_evicted_is_loaded_anew(harness, make_engine, monkeypatch):
    engine = make_engine(limits={"slots": 2})
    await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b", "c")]
    held, first, release, early = [], asyncio.Event(), asyncio.Event(), []
    unload, read_of, fetch_of = engine.unload, AdapterCache.manifest, AdapterCache.fetch

    async def held_unload(adapter):
        if not adapter.name.startswith("self-test."):
            held.append(adapter.name)
            first.set()
            await release.wait()
            held.remove(adapter.name)
        await unload(adapter)

    async def read(self, adapter):
        if adapter.engine_name in held:
            release.set()  # an evicted version begins to be loaded
        return await read_of(self, adapter)

    async def fetch(self, manifest):
        early.extend({manifest.adapter.engine_name} & {*held})
        return await fetch_of(self, manifest)

    engine.unload = held_unload
    monkeypatch.setattr(AdapterCache, "manifest", read)
    monkeypatch.setattr(AdapterCache, "fetch", fetch)
    async with asyncio.TaskGroup() as asked:
        asked.create_task(harness.ask(jobs[-1].request()))
        await first.wait()
        (evicted,) = (job for job in jobs if job.adapter(0).engine_name in held)
        asked.create_task(harness.ask(evicted.request()))
    assert (release.is_set(), early) == (True, [])

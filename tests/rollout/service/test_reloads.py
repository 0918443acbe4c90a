"""Versions that lost their slot and come back."""

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef
from marlaas_worker.rollout import reload_pace
from marlaas_worker.rollout.adapter_cache import AdapterCache

MakeEngine = Callable[..., Any]


def count_scores(engine: Any) -> list[str]:
    """Record the versions whose probes the engine scores."""
    scored: list[str] = []
    score = engine.score

    async def counting(adapter: Any, ids: Any) -> Any:
        if not adapter.name.startswith("self-test."):
            scored.append(adapter.name)
        return await score(adapter, ids)

    engine.score = counting
    return scored


def loads_of(replica: Any) -> tuple[float, float]:
    """The number of loads, and of re-loads among them, by the metrics."""
    samples = {sample.name: sample.value for sample in replica.context.metrics.all_samples()}
    return samples["marlaas_rollout_loads_total"], samples["marlaas_rollout_reloads_total"]


async def test_an_evicted_version_is_proven_by_its_digest_when_it_comes_back(
    harness: Any, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    twisted: list[Path] = []
    engine = make_engine(limits={"slots": 1}, twist=lambda folder: twisted[0] if twisted else folder)
    scored = count_scores(engine)
    replica = await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b")]
    for index in range(2):
        for job in jobs:
            await harness.result(job.request(index=index))
    names = [job.adapter(0).engine_name for job in jobs]
    assert engine.loads == [*names, *names]
    assert scored == names
    assert loads_of(replica) == (4, 2)
    await harness.publish(jobs[0], 7)
    twisted.append(harness.scratch / "published" / jobs[0].adapter(7).engine_name)
    refused = await harness.failure(jobs[0].request(index=2))
    assert ("digest check failed" in refused.error, refused.retryable) == (True, False)
    await replica.stop()
    assert re.search(
        r"4 loads of adapter versions took [\d.]+ s of the engine's time; 2 of them were re-loads", caplog.text
    )


async def test_a_prefetched_version_that_lost_its_slot_before_its_first_request_is_no_reload(
    harness: Any, make_engine: MakeEngine
) -> None:
    """Many jobs begin at once on few slots: first versions that were prefetched and evicted must not use up the time of re-loads."""
    engine = make_engine(limits={"slots": 1})
    scored = count_scores(engine)
    replica = await harness.replica(engine=engine)
    prefetched, other = [await harness.job(name) for name in ("a", "b")]
    for job in (other, prefetched):
        await harness.result(job.request())
    first, second = prefetched.adapter(0).engine_name, other.adapter(0).engine_name
    assert engine.loads == [first, second, first]
    assert scored == [first, second], "it was proven before, so its digest proves it"
    assert loads_of(replica) == (3, 0)


async def test_versions_that_no_request_uses_do_not_take_the_slots_from_each_other(
    harness: Any, make_engine: MakeEngine
) -> None:
    """Three agents in use whose next versions share two slots, before any request for these."""
    engine = make_engine(limits={"slots": 2})
    await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b", "c")]
    for job in jobs:
        await harness.result(job.request())
    for job in jobs:
        await harness.commit(job, 1)
    await harness.until(lambda: len(engine.loads) == 5)
    for index in range(1, 100):
        await harness.result(jobs[-1].request(index=index))
    newest = [name for name in engine.loads if name.endswith("v1")]
    assert newest == [job.adapter(1).engine_name for job in jobs[:2]], (
        "each once; the third one's group may use version 0"
    )


async def test_after_a_restart_of_the_engine_a_version_is_probed_again(harness: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(deaths=1)
    scored = count_scores(engine)
    _, job = await harness.serving(engine)
    await harness.result(job.request())
    assert scored == [job.adapter(0).engine_name] * 2


class HeldUnloads:
    """The unloads of an engine, which end when `release` is set.

    held: those that have begun and not ended. first: set when one has begun.
    """

    def __init__(self, engine: Any) -> None:
        self.held: list[str] = []
        self.first = asyncio.Event()
        self.release = asyncio.Event()
        self._unload = engine.unload
        engine.unload = self.unload

    async def unload(self, adapter: Any) -> None:
        if not adapter.name.startswith("self-test."):
            self.held.append(adapter.name)
            self.first.set()
            await self.release.wait()
            self.held.remove(adapter.name)
        await self._unload(adapter)


async def test_a_version_that_is_asked_for_while_it_is_evicted_is_loaded_after_its_files_are_removed(
    harness: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(limits={"slots": 2})
    await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b", "c")]
    unloads, read_of, fetch_of = HeldUnloads(engine), AdapterCache.manifest, AdapterCache.fetch
    fetched_early: list[str] = []

    async def read(self: AdapterCache, adapter: AdapterRef) -> Manifest:
        """Let the unloads end once an evicted version begins to be loaded."""
        if adapter.engine_name in unloads.held:
            unloads.release.set()
        return await read_of(self, adapter)

    async def fetch(self: AdapterCache, manifest: Manifest) -> Path:
        fetched_early.extend({manifest.adapter.engine_name} & {*unloads.held})
        return await fetch_of(self, manifest)

    monkeypatch.setattr(AdapterCache, "manifest", read)
    monkeypatch.setattr(AdapterCache, "fetch", fetch)
    async with asyncio.TaskGroup() as asked:
        asked.create_task(harness.ask(jobs[-1].request()))
        await unloads.first.wait()
        (evicted,) = (job for job in jobs if job.adapter(0).engine_name in unloads.held)
        asked.create_task(harness.ask(evicted.request()))
    assert unloads.release.is_set()
    assert not fetched_early


OPPONENT = {"name": "opponent", "policy": {"of": "policy", "versions": "past"}}


@pytest.mark.parametrize("caller", ["the open step", "an evaluation"])
async def test_a_past_version_that_is_called_keeps_its_slot_between_turns(
    harness: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    """The newest version of the strict job yields to the other job; if the past one counted as superseded, it would."""
    monkeypatch.setattr(reload_pace, "MIN_QUANTUM_S", 0.0)
    monkeypatch.setattr(reload_pace, "MAX_QUANTUM_S", 0.0)
    engine = make_engine(limits={"slots": 2})
    await harness.replica(engine=engine)
    job = await harness.job(agents=[{"name": "policy"}, OPPONENT], training={"steps": 3, "maxStaleness": 0})
    group = f"{job.uid}-e3v0"
    past = {
        "the open step": job.request(agent="opponent", turn=1, parent=None),
        "an evaluation": job.request(group=group, episode=f"{group}-0-1"),
    }[caller]
    await harness.pin(past, 0)
    await harness.result(past)
    await harness.commit_verified(job, 1)
    own, later = job.request(), past.model_copy(update={"turn": past.turn + 2, "parent": past.turn})
    await harness.pin(own, 1)
    for request in (own, later):
        await harness.result(request)
    assert [(await harness.turn(one)).version for one in (own, later)] == [1, 0]
    assert engine.unloads == []
    await harness.result((await harness.job("other")).request())
    assert engine.unloads == [job.adapter(1).engine_name]

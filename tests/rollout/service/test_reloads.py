"""Versions that lost their slot and come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlaas_api.messages import ReplyPhase
from marlaas_worker.rollout import paging


@pytest.fixture(autouse=True)
def brief_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a version lose its slot as soon as another one needs it."""
    for bound in ("MIN_QUANTUM_S", "MAX_QUANTUM_S"):
        monkeypatch.setattr(paging, bound, 0.01)


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


async def test_an_evicted_version_is_proven_by_its_digest_when_it_comes_back(
    harness: Any, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(limits={"slots": 1})
    scored = count_scores(engine)
    replica = await harness.replica(engine=engine)
    jobs = [await harness.job(name) for name in ("a", "b")]
    for index in range(2):
        for job in jobs:
            assert (await harness.ask(job.request(index=index))).phase is ReplyPhase.RESULT
    names = [job.adapter(0).engine_name for job in jobs]
    assert engine.loads == [*names, *names]
    assert scored == names
    samples = {sample.name: sample.value for sample in replica.context.metrics.all_samples()}
    assert samples["marlaas_rollout_loads_total"] == 4
    assert samples["marlaas_rollout_reloads_total"] == 2
    assert 0 < samples["marlaas_rollout_reload_seconds_total"] < samples["marlaas_rollout_load_seconds_total"]


async def test_a_version_that_comes_back_with_other_tensors_is_refused(
    harness: Any, make_engine: Callable[..., Any]
) -> None:
    twisted: list[Path] = []
    engine = make_engine(limits={"slots": 1}, twist=lambda folder: twisted[0] if twisted else folder)
    await harness.replica(engine=engine)
    first, second = [await harness.job(name) for name in ("a", "b")]
    await harness.ask(first.request())
    await harness.ask(second.request())
    await harness.publish(first, 7)
    twisted.append(harness.scratch / "published" / first.adapter(7).engine_name)
    reply = await harness.ask(first.request(index=1))
    assert (reply.phase, reply.retryable) == (ReplyPhase.FAILED, False)
    assert "digest check failed" in reply.error


async def test_after_a_restart_of_the_engine_a_version_is_probed_again(
    harness: Any, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(deaths=1)
    scored = count_scores(engine)
    await harness.replica(engine=engine)
    job = await harness.job()
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT
    assert scored == [job.adapter(0).engine_name] * 2

"""Memory is bounded by the jobs that exist: what belonged to a job is dropped when its document has been gone for a minute."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from marlaas_api import subjects
from marlaas_api.messages import GenerateRequest, ReplyPhase
from marlaas_worker.rollout import accounts, requests, service
from marlaas_worker.rollout.accounts import GONE_S, GoneJobs

NUM_JOBS, AT_ONCE = 200, 10


def test_totals_are_kept_for_a_minute_after_the_document() -> None:
    gone = GoneJobs()
    assert gone.expired(["a", "b"], ["a"], 0.0) == frozenset()
    assert gone.expired(["b"], ["a"], 10.0) == frozenset()
    assert gone.expired(["b"], ["a"], 9.0 + GONE_S) == frozenset()
    assert gone.expired(["b"], ["a"], 10.0 + GONE_S) == {"a"}
    assert gone.expired(["b"], [], 11.0 + GONE_S) == frozenset()


def test_a_document_that_was_only_missing_for_a_while_is_not_gone() -> None:
    gone = GoneJobs()
    gone.expired(["a"], [], 0.0)
    gone.expired([], [], 1.0)
    gone.expired(["a"], [], 2.0)
    assert gone.expired([], [], 3.0) == frozenset()
    assert gone.expired([], [], 2.0 + GONE_S) == frozenset()
    assert gone.expired([], [], 3.0 + GONE_S) == {"a"}


def test_a_request_that_ends_after_its_job_was_dropped_is_dropped_later() -> None:
    gone = GoneJobs()
    assert gone.expired([], ["late"], 0.0) == frozenset()
    assert gone.expired([], ["late"], GONE_S) == {"late"}
    assert gone.expired([], ["late"], GONE_S + 1) == frozenset()
    assert gone.expired([], ["late"], 2 * GONE_S + 1) == {"late"}


def sizes(role: Any) -> dict[str, int]:
    """The number of entries of each map that has entries by job, version, group, episode or request."""
    engine, proven = role._engine, role._versions.proven
    return {
        "tokens": len(engine.meter.job_tokens),
        "tenants' tokens": len(engine.meter.tenant_tokens),
        "engine_s": len(engine.meter.job_engine_s),
        "slot_s": len(role._versions.slot_seconds._ended) + len(role._versions.slot_seconds._began),
        "turn bytes": len(role._log.job_bytes),
        "outputs": len(engine.limiter.outputs._by_job),
        "episodes": len(engine.limiter.episodes),
        "pins": role._pins._known.num_bytes,
        "manifests": role._adapter_cache._manifests.num_bytes,
        "conversations": len(role._histories),
        "answers": len(role._requests._answered),
        "answer bytes": role._requests._answered_bytes,
        "characters": len(role._requests._characters),
        "active": len(role._requests._active),
        "proven": len(proven._versions),
        "refused": len(proven._refused),
        "newest": len(proven.newest),
        "waits": len(list(proven.waits)),
        "failures": len(role._versions._retries._failures),
        "used": len(role._versions._inputs._used_at),
        "gone": len(role._gone_jobs._known) + len(role._gone_jobs._gone_since),
        "told": len(role._template._told),
    }


async def play(harness: Any, number: int) -> None:
    """Run a job of one episode with three turns, and delete it."""
    job = await harness.job(f"job-{number}")
    for turn in range(3):
        assert (await harness.ask(job.request(turn=turn))).phase is ReplyPhase.RESULT
    document = job.document
    policy = subjects.policy_key(document.namespace, document.job, "policy")
    keys = {subjects.POLICY: policy, subjects.PROGRESS: document.ref.key, subjects.JOBS: document.ref.key}
    for bucket, key in keys.items():
        await (await harness.bus.bucket(bucket)).delete(key)


@pytest.mark.usefixtures("brief_quanta")
async def test_after_200_short_jobs_nothing_of_them_is_left(
    harness: Any, make_engine: Callable[..., Any], roles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "REREAD_S", 0.05)
    monkeypatch.setattr(accounts, "GONE_S", 0.0)
    monkeypatch.setattr("marlaas_worker.rollout.accounts.OPEN_S", 0.0)
    await harness.replica(engine=make_engine(limits={"slots": AT_ONCE}))
    for first in range(0, NUM_JOBS, AT_ONCE):
        await asyncio.gather(*(play(harness, number) for number in range(first, first + AT_ONCE)))
    await harness.until(lambda: not any(sizes(roles[0]).values()))
    assert roles[0]._engine.limiter._queue._root.below == {}
    assert len(roles[0]._versions._resident) <= AT_ONCE


async def test_remembered_answers_are_bounded_in_bytes(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A duplicate of a request gets the remembered answer at once; one whose answer was forgotten is accepted anew."""
    monkeypatch.setattr(requests, "REMEMBERED_BYTES", 2000)
    _, job = await harness.serving()
    for index in range(12):
        assert (await harness.ask(job.request(index=index))).phase is ReplyPhase.RESULT
    assert await phases(harness, job.request(index=11)) == [ReplyPhase.RESULT]
    assert await phases(harness, job.request(index=0)) == [ReplyPhase.ACCEPTED, ReplyPhase.RESULT]


async def phases(harness: Any, request: GenerateRequest) -> list[ReplyPhase]:
    """The replies to a request, without heartbeats."""
    async with harness.asking(request) as asked:
        await asked.end()
    return asked.without_heartbeats

"""Memory is bounded by the jobs that exist: what belonged to a job is dropped when its document has been gone for a minute."""

import asyncio
from collections.abc import Callable
from typing import Any

from marlaas_api import subjects
from marlaas_api.bucket_cache import REREAD_S
from marlaas_worker.rollout.accounts import GONE_S, OPEN_S

NUM_JOBS, AT_ONCE = 40, 10


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
        await harness.result(job.request(turn=turn))
    document = job.document
    policy = subjects.policy_key(document.namespace, document.job, "policy")
    keys = {subjects.POLICY: policy, subjects.PROGRESS: document.ref.key, subjects.JOBS: document.ref.key}
    for bucket, key in keys.items():
        await (await harness.bus.bucket(bucket)).delete(key)


async def test_after_40_short_jobs_nothing_of_them_is_left(
    harness: Any, make_engine: Callable[..., Any], roles: list[Any]
) -> None:
    await harness.replica(engine=make_engine(limits={"slots": AT_ONCE}))
    for first in range(0, NUM_JOBS, AT_ONCE):
        await asyncio.gather(*(play(harness, number) for number in range(first, first + AT_ONCE)))
    await asyncio.sleep(GONE_S + OPEN_S + 2 * REREAD_S)
    roles[0]._engine.limiter.episodes.close_old()  # as the next request would
    assert not any(sizes(roles[0]).values()), sizes(roles[0])
    assert roles[0]._engine.limiter._queue._root.below == {}
    assert len(roles[0]._versions._resident) <= AT_ONCE

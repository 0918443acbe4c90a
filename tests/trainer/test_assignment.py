"""Who may train an agent, and several trainers that share the agents of a pool."""

import asyncio
import contextlib

import pytest
from tests.harness import WITHIN_S, a_manifest, a_progress
from tests.tables import rows
from tests.trainer.harness import job

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusRefused
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.messages import Phase, PolicyRecord, ReplicaReport
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.reporter import Reporter
from marlaas_worker.trainer.assignment import (
    LEASE_GRACE_S,
    MIN_PART,
    PRIOR_S,
    WORK_HALF_LIFE_S,
    Absences,
    RecentWork,
    assignments,
    bound_record,
    may_bind,
    recent_costs,
)
from marlaas_worker.trainer.versions import PolicyKey, known_adapters
from marlaas_worker.trainer.view import TrainerCaches

MANIFEST = BlobRef(name="m", sha256="0" * 64, size_bytes=1)
HELD = PolicyRecord(uid="uid", version=3, manifest=MANIFEST, epoch=5, holder="trainer-0", step=4)


@pytest.mark.parametrize(("changes", "gone", "allowed"), rows(__file__, "may_bind"))
def test_an_agent_may_be_bound_if_nobody_alive_holds_it_for_this_job(changes, gone, allowed):
    record = None if changes is None else HELD.model_copy(update=changes)
    assert may_bind(record, "uid", "trainer-1", gone) == allowed


def test_a_bind_bumps_the_epoch_and_a_holder_is_gone_after_the_whole_grace_period():
    assert bound_record(HELD, "uid", "trainer-1") == HELD.model_copy(update={"epoch": 6, "holder": "trainer-1"})
    assert bound_record(HELD, "new", "trainer-1") == PolicyRecord(uid="new", epoch=6, holder="trainer-1")
    assert bound_record(None, "new", "trainer-1") == PolicyRecord(uid="new", epoch=0, holder="trainer-1")
    absences = Absences()
    absences.observe({"a", "b"}, {"b"}, 100.0)
    assert not absences.gone("a", 100.0 + LEASE_GRACE_S - 0.1)
    assert absences.gone("a", 100.0 + LEASE_GRACE_S)
    assert not absences.gone("b", 1e9)
    absences.observe({"a"}, {"a"}, 103.0)
    absences.observe({"a"}, set(), 104.0)
    assert not absences.gone("a", 103.0 + LEASE_GRACE_S)


@pytest.mark.parametrize(("job_changes", "progress_changes", "wanted"), rows(__file__, "wanted"))
def test_wanted_are_the_agents_of_admitted_unfinished_jobs_of_the_pool(job_changes, progress_changes, wanted):
    own = job_changes.get("agent")
    document = job(agent=own) if own else job().model_copy(update=job_changes)
    progress = {document.ref.key: a_progress(document, **progress_changes)}
    assert list(assignments([document], progress, "tiny")) == (["team-a.sums.policy"] if wanted else [])
    assert bool(assignments([document], progress, "large")) == bool({"pool", "agent"} & job_changes.keys())
    assert assignments([document], {}, "tiny") == {}


async def test_a_view_has_jobs_records_and_live_trainers_and_an_agent_with_an_unreadable_record_has_none(harness):
    good, bad = job("good"), job("bad")
    for document in (good, bad):
        await harness.admit(document)
    record = PolicyRecord(uid=good.uid, epoch=2, holder="trainer-7")
    await harness.put_policy(record, good)
    await (await harness.bus.bucket(subjects.POLICY)).put(harness.policy_key(bad), b"nonsense")
    await (await harness.bus.bucket(subjects.JOBS)).put("team-a.worse", b"nonsense")
    replicas = await harness.bus.bucket(subjects.REPLICAS)
    for key in (("trainer", "tiny", "trainer-7"), ("trainer", "large", "trainer-8"), ("rollout", "tiny", "rollout-0")):
        await replicas.put(subjects.replica_key(*key), b"a report")
    caches = TrainerCaches(harness.bus, "tiny", lambda: None)
    await caches.load()
    view = caches.view()
    assert {key: view.known[key].record for key in view.wanted} == {
        "team-a.good.policy": record,
        "team-a.bad.policy": None,
    }
    assert view.live == {"trainer-7"}
    assert view.holders == {"trainer-7"}


COSTS = {"a": 0.08, "b": 0.04, "c": 0.02, "d": 0.01}
"""Seconds of computation per second."""
LONG = 100 * WORK_HALF_LIFE_S


def test_work_counts_half_after_ten_minutes_and_a_new_agent_as_the_mean():
    work = RecentWork(0.0)
    work.advance(64.0, True, 100.0)
    assert work.advance(64.0, True, 100.0 + WORK_HALF_LIFE_S) == (32.0, 50.0 + WORK_HALF_LIFE_S)
    assert work.advance(64.0, False, 100.0 + 2 * WORK_HALF_LIFE_S) == (16.0, 325.0)
    assert work.advance(64.0, False, LONG) == (0.0, 0.0)
    work = {"a": (90.0, 1000.0), "idle": (0.0, 1000.0)}
    found = recent_costs(["a", "idle", "new"], [work])
    mean = 90.0 / 2000.0
    assert found["new"] == pytest.approx(mean)
    assert found["idle"] == pytest.approx(MIN_PART * mean)
    assert found["a"] == pytest.approx((90.0 + PRIOR_S * mean) / (1000.0 + PRIOR_S))
    assert recent_costs(["a", "b"], [{"a": (0.0, 1000.0)}]) == {"a": 1.0, "b": 1.0}
    assert recent_costs(["a", "b"], []) == {"a": 1.0, "b": 1.0}
    assert recent_costs([], [work]) == {}


async def placed(harness, names, on):
    """Who has which agent, as two trainers compute it, which report that all agents have their costs. on: the holders."""
    documents = {name: job(name) for name in names}
    keys = {name: harness.policy_key(document) for name, document in documents.items()}
    for name, document in documents.items():
        await harness.put(subjects.JOBS, document.ref.key, document)
        await harness.put(subjects.PROGRESS, document.ref.key, a_progress(document))
        await harness.put_policy(PolicyRecord(uid=document.uid, holder=on[name]), document)
    for trainer in ("trainer-0", "trainer-1"):
        work = {keys[name]: (COSTS[name] * LONG, LONG) for name in names if on[name] == trainer}
        report = ReplicaReport(role="trainer", pool="tiny", replica=trainer, agent_work=work)
        await harness.put(subjects.REPLICAS, subjects.replica_key("trainer", "tiny", trainer), report)
    caches = TrainerCaches(harness.bus, "tiny", lambda: None)
    await caches.load()
    view = caches.view()
    found = {trainer: view.placed_on(trainer, ()) for trainer in ("trainer-0", "trainer-1")}
    return {name: trainer for name in names for trainer, agents in found.items() if keys[name] in agents}


async def test_two_trainers_divide_agents_by_their_cost_and_no_agent_moves_again(harness):
    """8 + 4 and 2 + 1 become 8 and 4 + 2 + 1, though each trainer has two agents before."""
    first = {"a": "trainer-0", "b": "trainer-0", "c": "trainer-1", "d": "trainer-1"}
    after = await placed(harness, "abcd", first)
    assert after == {"a": "trainer-0", "b": "trainer-1", "c": "trainer-1", "d": "trainer-1"}
    assert await placed(harness, "abcd", after) == after


@pytest.mark.parametrize(("num_before", "known"), [(0, {3}), (1, {2, 3}), (2, {1, 2, 3}), (9, {1, 2, 3})])
async def test_adapters_are_known_for_as_many_versions_as_groups_may_be_stale(num_before, known):
    blobs, parent = MemoryBlobs(), BlobRef(name="gone", sha256="0" * 64, size_bytes=1)
    for version in (1, 2, 3):
        files = {TENSORS_FILE: BlobRef(name="x", sha256=sha256_hex(b"%d" % version), size_bytes=1)}
        manifest = a_manifest(job(), version, parent=parent, files=files)
        parent = await blobs.put("a", "manifest", wire.encode(manifest))
    found = await known_adapters(blobs, manifest, num_before)
    assert found == {version: sha256_hex(b"%d" % version) for version in known}


async def bound(harness, name, num):
    return (await harness.report(lambda found: len(found.bound) == num, name)).bound


async def test_a_trainer_that_joins_takes_over_its_share_and_each_agent_ends_where_it_ends_alone(harness):
    documents = [job(f"job-{number}") for number in range(4)]
    for document in documents:
        await harness.admit(document)
    async with harness.trainer(), asyncio.timeout(WITHIN_S):
        for document in documents:
            await harness.play(document, 1)
        await bound(harness, "trainer-0", 4)
        async with harness.trainer("trainer-1"):
            mine, others = await bound(harness, "trainer-0", 2), await bound(harness, "trainer-1", 2)
            assert not {name.partition("@")[0] for name in mine} & {name.partition("@")[0] for name in others}
            for document in documents:
                await harness.play(document, 1, first=1)
            trainers = [manifest.trainer for document in documents for manifest in await harness.history(document)]
            assert {trainers.count(name) for name in ("trainer-0", "trainer-1")} == {10, 2}
        await bound(harness, "trainer-0", 4)  # trainer-1 has released its leases; no grace period passes
    assert [await harness.adapter(documents[0])] == await (await harness.another()).trained(documents[0], steps=2)
    assert [(await harness.record(document)).holder for document in documents] == [""] * 4


@contextlib.asynccontextmanager
async def doomed_trainer(harness, monkeypatch):
    """The trainer `trainer-1`, which is killed at the end: a killed process releases and withdraws nothing."""

    async def dead(*_: object):
        pass

    doomed = asyncio.create_task(harness.serve(await harness.context("trainer-1")))
    await harness.report(lambda _: True, "trainer-1")
    yield
    with monkeypatch.context() as patched:
        for owner, name in ((PolicyKey, "release"), (Reporter, "withdraw"), (MemoryBus, "delete_consumer")):
            patched.setattr(owner, name, dead)
        doomed.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await doomed


@pytest.mark.parametrize("successor", ["trainer-1", "trainer-2"], ids=["restarted", "another"])
async def test_what_a_killed_trainer_has_left_of_a_job_that_ended_since_is_removed(harness, monkeypatch, successor):
    document = job()
    async with asyncio.timeout(WITHIN_S):
        async with doomed_trainer(harness, monkeypatch):
            await harness.admit(document)
            await harness.play(document, 1)
        await harness.admit(document, phase=Phase.SUCCEEDED)
        consumers = harness.server.stream(subjects.GROUPS).consumers
        assert ((await harness.record(document)).holder, len(consumers)) == ("trainer-1", 1)
        async with harness.trainer(successor):
            clock = asyncio.create_task(harness.let_time_pass())
            await harness.committed(document, lambda record: not record.holder)
            clock.cancel()
    assert (len(consumers), (await harness.record(document)).version) == (0, 1)


async def test_what_the_bus_refuses_a_trainer_is_not_the_jobs_fault(harness, monkeypatch):
    document, read = job(), MemoryBucket.get_from_leader

    async def refuse(bucket, key):
        if key == subjects.policy_key("team-a", document.job, "policy"):
            raise BusRefused(f"no permission to read {key}")
        return await read(bucket, key)

    monkeypatch.setattr(MemoryBucket, "get_from_leader", refuse)
    await harness.admit(document)
    async with harness.trainer(), asyncio.timeout(WITHIN_S):
        found = await harness.report(lambda found: bool(found.refused))
        assert (found.refused, found.broken) == (("team-a.sums.policy",), {})
        assert "no permission to read" in (await harness.emitted(document, "BusRefused")).message
        monkeypatch.setattr(MemoryBucket, "get_from_leader", read)
        harness.clock.at += 1e7
        await harness.play(document, 1)

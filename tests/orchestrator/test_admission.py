"""Verdicts on waiting jobs: admitted, or queued with a reason. Admitted is admitted: no edit, restart, error or smaller pool displaces a running job."""

import asyncio
from typing import Any

import pytest
from tests.harness import changed, working
from tests.orchestrator.harness import OrchestratorHarness, a_job, final, mixed
from tests.tables import rows

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Phase, TenantQuota
from marlaas_worker.orchestrator import admission, service
from marlaas_worker.orchestrator.capacity import PoolCapacity
from marlaas_worker.orchestrator.preemption import MIN_RUN_S

POOL = {"tiny": PoolCapacity(slots=6, max_rank=16, max_model_len=2048, agents=3)}
LATER = 10 * MIN_RUN_S
ROOM = PoolCapacity(slots=2, max_rank=16, agents=1)
BOTH = {"tiny": ROOM, "big": ROOM}
WHOLE_POOL = 6
"""maxStaleness of a job whose versions fill all 8 slots."""


def scene(waiting, holding=(), now: float = 0.0, **fields) -> admission.AdmissionScene:
    jobs = {"waiting": list(waiting), "holding": list(holding), "since": [0.0] * len(holding)}
    return admission.AdmissionScene(**{**jobs, "pools": POOL, "now": now, **fields})


def one(document, holding=(), **fields) -> admission.Admission:
    return admission.AdmissionQueue().decide(scene([document], holding, **fields)).admissions[document.uid]


def of(document: JobDocument, tenant: str) -> JobDocument:
    uid = f"{tenant}-{document.job}"
    return document.model_copy(update={"namespace": f"{tenant}-1", "tenant": tenant, "uid": uid})


def several(document, number: int, tenant: str = "team-a") -> list[JobDocument]:
    return [of(document(f"j{n}", created_at=n), tenant) for n in range(number)]


def admitted(decision: admission.AdmissionDecision) -> set[str]:
    return {uid for uid, verdict in decision.admissions.items() if verdict.admitted}


@pytest.mark.parametrize(("settings", "pool", "reason", "words"), rows(__file__, "unfit"))
def test_what_replicas_cannot_do_now_is_waited_for_with_both_numbers(document, settings, pool, reason, words):
    pools = {} if pool is None else {"tiny": PoolCapacity(**pool)}
    verdict = one(document(**settings), pools=pools)
    assert (verdict.admitted, verdict.reason) == (False, reason)
    assert words in verdict.message


def test_agents_that_take_turns_outnumber_the_slots_and_the_next_job_is_queued(document):
    """It is queued also if the running jobs hold more than their pool has now."""
    for number in (3, 5):
        verdict = one(document("late"), several(document, number))
        assert (verdict.admitted, verdict.reason) == (False, "WaitingForSlots")
        assert "pool tiny admits 3 agents at once" in verdict.message


def test_a_neighbours_adapters_never_take_a_trainer_out_of_memory(document):
    pool = PoolCapacity(6, 16, agents=24, trainer_bytes=21 << 20, bytes_per_rank=1 << 20)
    early = [document(name, rank=16) for name in ("one", "two")]
    assert one(document("late", rank=8), early, pools={"tiny": pool}).admitted
    verdict = one(document("late", rank=16), early, pools={"tiny": pool})
    words = "running jobs use too much of the trainer memory of pool tiny"
    assert (verdict.reason, verdict.message) == ("WaitingForMemory", words)


def test_a_quota_holds_within_one_round(document):
    jobs = several(document, 3)
    terms = {"team-a": admission.TenantTerms(quota=TenantQuota(adapter_slots=2))}
    assert admitted(admission.AdmissionQueue().decide(scene(jobs, tenants=terms))) == {jobs[0].uid, jobs[1].uid}


def test_the_place_of_a_preempted_job_is_kept_for_the_preemptor_until_the_victim_has_stopped(document):
    queue, holding = admission.AdmissionQueue(), several(document, 3)
    new, other = of(document("new", created_at=99), "team-b"), of(document("x", created_at=1), "team-c")
    said = queue.decide(scene([new], holding, LATER)).preempted
    words = "preempted by tenant team-b (team-b-1/new), whose share is smaller; it resumes where it stopped when there is room"
    assert said == {"team-a-j2": words}
    during = queue.decide(scene([new, other], holding[:2], LATER, pools={"tiny": PoolCapacity(6, 16, agents=3)}))
    assert admitted(during) == {new.uid}
    again = admission.AdmissionQueue()
    again.decide(scene([new], holding, LATER))
    assert again.decide(scene([new], holding, LATER + admission.RECONSIDER_S)).preempted == said, "and nothing more"


def test_a_free_place_is_kept_for_the_preemptor_that_needs_it_beside_those_of_its_victims(document):
    queue, holding, pools = admission.AdmissionQueue(), several(document, 3), {"tiny": PoolCapacity(6, 16, agents=4)}
    new = of(document("new", agents=[{"name": "a"}, {"name": "b"}], created_at=99), "team-b")
    assert queue.decide(scene([new], holding, LATER, pools=pools)).preempted.keys() == {"team-a-j2"}
    other = of(document("x", created_at=1), "team-c")
    assert admitted(queue.decide(scene([new, other], holding, LATER, pools=pools))) == set()
    assert admitted(queue.decide(scene([new, other], holding[:2], LATER, pools=pools))) == {new.uid}


def team(name: str = "team", pool: str = "tiny", other: str = "big", **fields) -> JobDocument:
    agents = [{"name": "a"}, {"name": "b", "poolRef": {"name": other}}]
    return a_job(name, agents=agents, **fields).model_copy(update={"pool": pool})


def test_a_job_is_admitted_to_all_its_pools_or_to_none():
    assert one(team(), pools=BOTH).admitted
    holder = a_job("holder").model_copy(update={"pool": "big"})
    verdict = one(team(), [holder], pools=BOTH)
    assert (verdict.admitted, verdict.reason) == (False, "WaitingForSlots")
    assert "pool big (agent b) admits 1 agents at once" in verdict.message
    waiting = [team(created_at=1), a_job("alone", created_at=2)]
    admissions = admission.AdmissionQueue().decide(scene(waiting, [holder], pools=BOTH)).admissions
    assert [admissions[job.uid].admitted for job in waiting] == [False, False], "the place on tiny is kept for it"


@pytest.mark.parametrize(("role", "name", "reason", "missing"), rows(__file__, "missing_workers"))
async def test_a_job_waits_for_workers_of_a_pool_that_disappear_and_then_goes_on(harness, role, name, reason, missing):
    job, lost = team(), subjects.replica_key(role, "big", name)
    harness.pause_after = 2  # both agents have trained one step
    await harness.report_pool("tiny", job, -1)
    await harness.submit(job)
    roles = harness.keep("orchestrator", service.serve), harness.play(job, mixed)
    async with working(*roles):
        waits = await harness.progress(job, lambda level: level.reason == "WaitingForPool")
        assert (waits.admitted, waits.message) == (False, "no rollout replica of pool big (agent b) is ready yet")
        async with working(harness.train(job)):
            await harness.progress(job, lambda level: level.step == 1)
            await (await harness.bus.bucket(subjects.REPLICAS)).delete(lost)
            waits = await harness.progress(job, lambda level: level.reason == reason)
            assert (waits.phase, waits.admitted, waits.step) == (Phase.RUNNING, True, 1)
            assert waits.message == f"{missing}; the job goes on when one is"
            assert waits.admitted_at < waits.reason_at <= waits.at
            harness.may_train.set()
            await harness.report_pool("big", job, 1)
            await harness.put_report("trainer", "t0", pool="big")
            ended = await harness.progress(job, final)
    assert (ended.phase, ended.versions) == (Phase.SUCCEEDED, {"a": 3, "b": 3})
    assert len(await harness.steps(job)) == 3


def moved(document: JobDocument, namespace: str) -> JobDocument:
    """The same job in another namespace, which is a tenant by itself."""
    return document.model_copy(update={"namespace": namespace, "tenant": namespace, "uid": f"uid-{namespace}"})


def loop(document: JobDocument) -> asyncio.Task[Any]:
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == f"job {document.ref}"]
    return task


@pytest.fixture
async def rivals(harness: OrchestratorHarness, document: Any) -> tuple[JobDocument, JobDocument]:
    """Two jobs that need the whole pool: the second is queued while the first runs, and stands before it in every alphabet."""
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    first = moved(document("sums", maxStaleness=WHOLE_POOL), "team-z")
    return first, moved(document("sums", maxStaleness=WHOLE_POOL, priority=9), "team-a")


async def one_runs(harness: OrchestratorHarness, first: JobDocument, second: JobDocument) -> None:
    await harness.submit(first)
    await harness.progress(first, lambda level: level.admitted)
    await harness.submit(second)
    await harness.progress(second, lambda level: level.reason == "WaitingForMemory")


@pytest.mark.parametrize("part", ["ttl_seconds_after_finished", "priority", "steps"])
async def test_an_edit_that_does_not_concern_the_loop_neither_displaces_nor_restarts_it(harness, rivals, part):
    first, second = rivals
    more_steps = {"training": first.spec.training.model_copy(update={"steps": 9})}
    async with harness.orchestrating():
        await one_runs(harness, first, second)
        before = loop(first)
        await harness.submit(changed(first, **(more_steps if part == "steps" else {part: 60})))
        level = await harness.progress(first, lambda level: level.generation == 2)
        assert (level.admitted, level.steps) == (True, 9 if part == "steps" else 3)
        assert (loop(first) is before) is (part != "steps")


@pytest.mark.parametrize("slots", [8, 4], ids=["as before", "fewer slots than it holds"])
async def test_a_restart_of_the_orchestrator_displaces_nobody(harness, rivals, slots):
    first, second = rivals
    async with harness.orchestrating("one"):
        await one_runs(harness, first, second)
    await harness.put_report(slots=slots, max_rank=16, kv_tokens=1)
    third = moved(first, "team-0")
    async with harness.orchestrating("two"):
        await harness.submit(third)
        assert not (await harness.progress(third, lambda level: True)).admitted, "the new one has decided"
        assert (await harness.progress(first, lambda level: True)).admitted
        assert not (await harness.progress(second, lambda level: True)).admitted


async def test_a_job_whose_document_cannot_be_read_any_more_runs_on_and_keeps_its_slots(harness, rivals):
    first, second = rivals
    async with harness.orchestrating():
        await one_runs(harness, first, second)
        before = loop(first)
        await (await harness.bus.bucket(subjects.JOBS)).put(first.ref.key, b"of a later release")
        third = moved(first, "team-0")
        await harness.submit(third)
        assert not (await harness.progress(third, lambda level: True)).admitted
        assert loop(first) is before
    assert not (await harness.progress(second, lambda level: True)).admitted


async def test_what_only_the_replicas_of_before_a_pools_change_cannot_do_is_waited_for(harness, document):
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    await harness.put_report(replica="rollout-1", slots=16, max_rank=64, kv_tokens=1)
    waiting = document(rank=32)
    async with harness.orchestrating():
        await harness.submit(waiting)
        level = await harness.progress(waiting, lambda level: True)
        assert (level.phase, level.reason) == (Phase.QUEUED, "WaitingForPool")
        assert "rank 32" in level.message
        await harness.put_report(slots=16, max_rank=64, kv_tokens=1)
        assert (await harness.progress(waiting, lambda level: level.phase is not Phase.QUEUED)).admitted

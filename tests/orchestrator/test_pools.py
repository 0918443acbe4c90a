"""A job whose agents run on several pools: admitted to all of them or to none; it says which pool and which agent it waits for."""

import pytest
from tests.harness import a_progress, changed, working
from tests.orchestrator.harness import OrchestratorHarness, a_job, final, mixed
from tests.orchestrator.test_admission import one, scene

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Phase, PolicyRecord, ReplicaReport
from marlaas_worker.orchestrator import service
from marlaas_worker.orchestrator.admission import AdmissionQueue
from marlaas_worker.orchestrator.capacity import PoolCapacity
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.reports import dated, ending
from marlaas_worker.orchestrator.usage import JobUsage

ROOM = PoolCapacity(slots=2, max_rank=16, agents=1)
BOTH = {"tiny": ROOM, "big": ROOM}


def team(name: str = "team", pool: str = "tiny", other: str = "big", **fields) -> JobDocument:
    """A job of the agents `a` on its own pool and `b` on another."""
    agents = [{"name": "a"}, {"name": "b", "poolRef": {"name": other}}]
    return a_job(name, agents=agents, **fields).model_copy(update={"pool": pool})


def test_a_job_is_admitted_to_all_its_pools_or_to_none():
    assert one(team(), pools=BOTH).admitted
    holder = a_job("holder").model_copy(update={"pool": "big"})
    verdict = one(team(), [holder], pools=BOTH)
    assert (verdict.admitted, verdict.reason) == (False, "WaitingForSlots")
    assert "pool big (agent b) admits 1 agents at once" in verdict.message
    waiting = [team(created_at=1), a_job("alone", created_at=2)]
    admissions = AdmissionQueue().decide(scene(waiting, [holder], pools=BOTH)).admissions
    assert [admissions[job.uid].admitted for job in waiting] == [False, False], "the place on tiny is kept for it"


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"tiny": ROOM}, "no rollout replica of pool big (agent b) is ready yet"),
        ({"big": ROOM}, "no rollout replica of pool tiny (agent a) is ready yet"),
        (
            {"tiny": ROOM, "big": PoolCapacity(slots=2, max_rank=1, agents=1)},
            "has adapter rank 8, and maxRank is 1 in a replica of pool big (agent b) that serves now; it begins when every replica has enough",
        ),
    ],
)
def test_what_a_pool_lacks_is_told_with_its_agents(pools, message):
    assert (one(team(), pools=pools).reason, one(team(), pools=pools).message) == ("WaitingForPool", message)


def test_replicas_of_one_name_in_two_pools_are_counted_apart():
    def report(pool: str, tokens: int) -> ReplicaReport:
        return ReplicaReport(role="rollout", pool=pool, replica="rollout-0", job_tokens={"u": tokens})

    usage = JobUsage("u")
    for tokens in (100, 200):
        usage.see([report("tiny", tokens), report("big", 10)], float(tokens))
    assert usage.totals()["tokens"] == 210


def test_a_deadline_before_version_0_names_the_pool_whose_trainer_has_not_published_it():
    document = changed(team(), active_deadline_seconds=1.0)
    state = JobState(document, History(policies={"a": PolicyRecord(uid=document.uid, version=0)}))
    found = ending(state, None, 2.0)
    assert found is not None
    assert found[2].endswith("; waiting for a trainer of pool big (agent b) to publish version 0")


def test_the_time_of_a_reason_is_that_of_its_first_report_until_the_job_has_another_one():
    job, waits = a_job(), {"reason": "WaitingForPool", "at": 5.0}
    first = dated(a_progress(job, **waits), a_progress(job, reason="Training", reason_at=1.0, at=4.0))
    assert first.reason_at == 5.0
    assert dated(a_progress(job, **waits | {"at": 9.0}), first).reason_at == 5.0
    paused = first.model_copy(update={"admitted": False, "reason_at": None})
    assert dated(a_progress(job, **waits | {"at": 9.0}), paused).reason_at == 9.0


@pytest.mark.parametrize(
    ("role", "name", "reason", "missing"),
    [
        ("rollout", "rollout-0", "WaitingForPool", "no rollout replica of pool big (agent b) is ready"),
        ("trainer", "t0", "WaitingForTrainer", "no trainer of pool big (agent b) is ready"),
    ],
)
async def test_a_job_waits_for_workers_of_a_pool_that_disappear_and_goes_on_when_they_are_back(
    harness: OrchestratorHarness, role: str, name: str, reason: str, missing: str
):
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

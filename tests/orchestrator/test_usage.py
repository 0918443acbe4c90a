"""Use of jobs from the totals that replicas report: each token once, whatever is restarted."""

import pytest
from tests.harness import a_progress

from marlaas_api.messages import Phase, Progress, ReplicaReport, UsageAmounts
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator import reports
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage


def test_a_job_that_goes_on_counts_every_total_of_a_replica_once(document):
    """Replicas report totals since their start, in which its published progress is contained in part."""

    def report(replica: str, tokens: int) -> ReplicaReport:
        return ReplicaReport(
            role="rollout",
            pool="tiny",
            replica=replica,
            job_tokens={job.uid: tokens},
            job_engine_s={job.uid: tokens / 10},
            agent_slot_s={job.uid: {"policy": tokens / 5, "critic": tokens / 2}},
            job_preempted_tokens={job.uid: tokens // 2},
            job_preempted_engine_s={job.uid: tokens / 20},
        )

    job = document()
    first = JobUsage.of(job.uid, None)
    for tokens in (0, 600, 1000):
        first.see([report("rollout-0", tokens)], tokens)
    before = a_progress(job, **first.totals(), usage=first.with_slots({}))
    again = JobUsage.of(job.uid, decode_as(Progress, encode(before)))
    again.see([report("rollout-0", 1000)], 1.0)
    assert (again.tokens.total, again.engine_s.total) == (1000, 100.0)
    again.see([report("rollout-0", 1200), report("rollout-1", 0)], 2.0)
    again.see([report("rollout-0", 30), report("rollout-1", 50)], 3.0)  # the first was restarted
    assert (again.tokens.total, again.engine_s.total) == (1280, 128.0)
    assert (again.preempted_tokens.total, again.preempted_engine_s.total) == (640, 64.0)
    slots = {"policy": UsageAmounts(slot_s=256.0), "critic": UsageAmounts(slot_s=640.0)}
    assert again.with_slots({}) == slots
    without = ReplicaReport(role="rollout", pool="tiny", replica="rollout-1")  # restarted, without the job so far
    again.see([without], 4.0)
    again.see([report("rollout-1", 60)], 5.0)
    assert again.with_slots({})["policy"] == UsageAmounts(slot_s=268.0)
    between = JobUsage.of(job.uid, before)
    between.see([report("rollout-0", 1500), report("rollout-1", 70)], 1.0)
    assert (between.tokens.total, between.engine_s.total) == (1570, 157.0), "used while no orchestrator was there"
    restarted = JobUsage.of(job.uid, before)
    restarted.see([report("rollout-0", 40)], 1.0)
    assert (restarted.tokens.total, restarted.preempted_tokens.total, restarted.preempted_engine_s.total) == (
        1040,
        520,
        52.0,
    )


async def test_a_quota_of_tokens_counts_no_token_twice_when_a_job_is_preempted_and_resumes(harness, document):
    job, store = document(), ProgressStore(harness.bus)
    running = a_progress(job, tenant="team-a", tokens=50, admitted_at=1.0)
    preempted = reports.preempted(job, running, UsageAmounts(generated_tokens=3), "by tenant x")
    resumed = reports.admitted(job, preempted, AdmittedTime.of(preempted, 9.0))
    decided = UsageAmounts(generated_tokens=4, preempted_tokens=4)  # of these, 3 were known at the preemption
    cut = {"usage": {"policy": decided}, "preempted_tokens": 6}
    for level in (running, preempted, resumed, resumed.model_copy(update={"tokens": 80, **cut})):
        await store.put(level)
    assert store.take_gained() == {"team-a": (70.0, 0.0)}, "without those that the preemption cut"


def test_each_preemption_adds_what_it_cuts_to_what_is_known_of_earlier_ones(document):
    """Also if those were counted only when their groups were decided."""
    decided = UsageAmounts(generated_tokens=500, preempted_tokens=500, engine_s=5.0, preempted_engine_s=5.0)
    level = a_progress(document(), tokens=1000, accelerator_s=10.0, usage={"policy": decided})
    for number, cut in enumerate((300, 40), start=1):
        used = UsageAmounts(generated_tokens=cut, engine_s=cut / 100)
        level = reports.preempted(document(), level, used, "by tenant x")
        assert level.num_preemptions == number
    assert (level.amounts.preempted_tokens, level.amounts.charged_tokens) == (840, 160)
    assert level.amounts.preempted_engine_s == pytest.approx(8.4)


def test_what_the_engines_generated_beyond_the_records_is_open_until_the_job_ends(document):
    recorded = UsageAmounts(
        generated_tokens=30, trained_tokens=30, trainer_s=2.0, sandbox_s=4.0, slot_s=0.5, stored_bytes=7
    )
    usage = {"policy": recorded, "critic": UsageAmounts(slot_s=2.5, stored_bytes=4)}
    told = {"usage": usage, "tokens": 100, "accelerator_s": 1.5, "trainer_s": 2.5, "admitted_s": 60.0}
    running = a_progress(document(), **told).amounts
    assert (running.generated_tokens, running.trained_tokens, running.open_tokens) == (100, 30, 70)
    assert (running.engine_s, running.trainer_s, running.sandbox_s, running.admitted_s) == (1.5, 2.5, 4.0, 60.0)
    assert (running.slot_s, running.stored_bytes, running.wasted_tokens) == (3.0, 11, 0)
    ended = a_progress(document(), **told | {"phase": Phase.FAILED}).amounts
    assert (ended.generated_tokens, ended.open_tokens, ended.unrecorded_tokens, ended.wasted_tokens) == (100, 0, 70, 70)
    cut = {"preempted_tokens": 60, "preempted_engine_s": 0.5}
    preempted = a_progress(document(), **told, **cut).amounts
    assert (preempted.preempted_tokens, preempted.open_tokens, preempted.generated_tokens) == (60, 10, 100)
    assert (preempted.charged_tokens, preempted.charged_engine_s) == (40, 1.0)
    undecided = {"cut_tokens": 8, "cut_engine_s": 0.25}
    counted = a_progress(document(), **told, **cut, **undecided).amounts
    assert (counted.preempted_tokens, counted.open_tokens, counted.preempted_engine_s) == (68, 2, 0.75)
    own = recorded + UsageAmounts(generated_tokens=10, preempted_tokens=10, engine_s=0.5, preempted_engine_s=0.5)
    decided = a_progress(document(), **{**told, "usage": {"policy": own}}, **undecided).amounts
    assert (decided.preempted_tokens, decided.open_tokens, decided.preempted_engine_s) == (10, 60, 0.5)
    trained = recorded + UsageAmounts(generated_tokens=70, trained_tokens=70, engine_s=1.5)
    fewer_seconds = a_progress(document(), **{**told, "usage": {"policy": trained}, "accelerator_s": 0.0}, **undecided)
    assert fewer_seconds.completed(UsageAmounts(engine_s=0.1)).preempted_engine_s == 0.0
    late = a_progress(document(), **{**told, "usage": {"policy": trained}}, **undecided).amounts
    assert (late.charged_tokens, late.charged_engine_s) == (100, 1.5), "an Episode that came late is charged"
    fewer = a_progress(document(), **told | {"tokens": 5}).amounts
    assert (fewer.generated_tokens, fewer.open_tokens) == (30, 0), "recorded turns are certain"

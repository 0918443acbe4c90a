"""Tenants at the orchestrator: quotas of documents apply at once, rates pause running jobs, past use survives a restart."""

from tests.harness import a_progress
from tests.orchestrator.harness import OrchestratorHarness, mixed, running

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, PastUses, Phase, TenantQuota, UsageAmounts
from marlaas_worker.orchestrator import quota
from marlaas_worker.orchestrator.admission import AdmissionQueue
from marlaas_worker.orchestrator.admission_inputs import terms_of
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.tenants import TenantUse


def limited(document: JobDocument, **limits) -> JobDocument:
    return document.model_copy(update={"tenant_quota": TenantQuota(**limits), "tenant_weight": 3.0})


async def test_a_quota_queues_a_job_and_a_raised_one_admits_it_without_restarting_the_first(harness, document):
    await harness.put_report(slots=8, max_rank=16)
    first, second = limited(document("first"), jobs=1), limited(document("second", created_at=1.0), jobs=1)
    async with harness.orchestrating():
        await harness.submit(first)
        await harness.progress(first, lambda level: level.admitted)
        await harness.submit(second)
        level = await harness.progress(second, lambda level: level.reason == "OverQuota")
        assert (level.phase, level.admitted) == (Phase.QUEUED, False)
        assert level.message == "over quota: 1 of 1 jobs; waits for team-a/first, 0 of 3 steps"
        began = (await harness.progress(first, lambda level: True)).admitted_at
        await harness.submit(limited(second, jobs=2))
        await harness.progress(second, lambda level: level.admitted)
        assert (await harness.progress(first, lambda level: True)).admitted_at == began


async def test_a_tenant_over_its_kept_bytes_is_queued_until_bytes_are_freed(harness, document):
    await harness.put_report(slots=8, max_rank=16)
    ended, waiting = (limited(document(name), storage="3Gi") for name in ("ended", "waiting"))
    kept = {name: UsageAmounts(stored_bytes=gib << 30) for name, gib in (("solver", 2), ("critic", 1))}
    await harness.admit(ended, phase=Phase.SUCCEEDED, admitted=False, usage=kept, tenant="team-a")
    async with harness.orchestrating():
        await harness.submit(waiting)
        level = await harness.progress(waiting, lambda level: True)
        assert (level.phase, level.admitted, level.reason) == (Phase.QUEUED, False, "OverQuota")
        assert level.message.startswith("over quota: 3.0 of 3.0 GiB stored; delete jobs")
        await harness.submit(ended.model_copy(update={"deleted": True}))
        await harness.progress(waiting, lambda level: level.admitted)


async def test_a_quota_of_trainer_time_pauses_a_job_and_never_fails_it(harness, document, monkeypatch):
    """Each step takes 1.5 s of the trainer, which waits in each step until the test lets it go on."""
    monkeypatch.setattr(quota, "TRAINER_WINDOW_S", 1.0)
    job, step_by_step = limited(document(steps=4), trainer_seconds_per_hour=1.0), True

    def rewards(task, member):
        if step_by_step:
            harness.may_train.clear()
        return mixed(task, member)

    async with running(harness, job, rewards):
        await harness.progress(job, lambda level: level.num_outstanding > 0)
        harness.may_train.set()
        level = await harness.progress(job, lambda level: level.reason == "OverQuota")
        assert (level.phase, level.admitted) == (Phase.RUNNING, True)
        assert "over quota of tenant team-a: more than 1 trainer seconds an hour" in level.message
        assert 0 < level.step < 4
        step_by_step = False
        harness.may_train.set()
        await harness.submit(limited(job))
        level = await harness.progress(job, lambda level: level.phase.final)
    assert (level.phase, level.trainer_s) == (Phase.SUCCEEDED, 6.0)


async def test_use_of_a_job_that_ends_between_two_rounds_counts_for_its_tenants_rates_and_earlier_use_does_not(
    harness, document
):
    old, short = limited(document("old"), tokens_per_second=1.0), limited(document("short"), tokens_per_second=1.0)
    store = ProgressStore(harness.bus)
    await store.put(a_progress(old, tenant="team-a", tokens=10**9))
    store = ProgressStore(harness.bus)
    await store.load()
    use, terms = TenantUse(harness.bus, AdmissionQueue(), store), terms_of([(1, old)])
    await store.put(a_progress(old, tenant="team-a", tokens=10**9 + 50))
    use.note(terms, 0.0)
    assert not use.pacing.reason("team-a"), "50 tokens within the window of a minute"
    await store.put(a_progress(short, tenant="team-a"))
    await store.put(a_progress(short, tenant="team-a", tokens=40, phase=Phase.SUCCEEDED, admitted=False))
    use.note(terms, 0.0)
    assert use.pacing.reason("team-a")


async def test_past_use_is_written_and_read_by_the_next_orchestrator(harness: OrchestratorHarness, document):
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    job = document()
    async with harness.orchestrating("one"):
        await harness.submit(job)
        await harness.progress(job, lambda level: level.admitted)
        record = await harness.wait_for(PastUses, subjects.TENANTS, subjects.PAST_USE, lambda found: found.use)
    assert record.use["team-a"] >= 60.0, "its entry, at least"
    queue = AdmissionQueue()
    use = TenantUse(harness.bus, queue, ProgressStore(harness.bus))
    await use.load()
    assert queue.past.of("team-a") >= record.use["team-a"]
    assert queue.past.at is not None


async def test_past_use_that_cannot_be_read_counts_as_none(harness):
    await (await harness.bus.bucket(subjects.TENANTS)).put(subjects.PAST_USE, b"of another release")
    queue = AdmissionQueue()
    await TenantUse(harness.bus, queue, ProgressStore(harness.bus)).load()
    assert queue.past.use == {}


def test_while_a_tenants_documents_differ_the_last_written_one_counts(document):
    old, new = limited(document("old"), jobs=1), limited(document("new"), jobs=2)
    assert terms_of([(7, new), (3, old)])["team-a"].quota == TenantQuota(jobs=2)
    assert terms_of([(7, old), (9, new), (8, old)])["team-a"].quota == TenantQuota(jobs=2)
    assert terms_of([(1, document())])["team-a"].weight == 1.0

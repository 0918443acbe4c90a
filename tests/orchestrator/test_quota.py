"""Quotas: what they refuse, what the messages say and how rarely they change, and when a tenant's jobs pause."""

import pytest
from tests.orchestrator.harness import mixed, running
from tests.tables import rows

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, PastUses, Phase, Progress, TenantQuota
from marlaas_worker.orchestrator import quota
from marlaas_worker.orchestrator.admission import AdmissionQueue
from marlaas_worker.orchestrator.quota import Pacing, QuotaMessages, Quotas
from marlaas_worker.orchestrator.tenants import TenantUse


@pytest.mark.parametrize(("quota", "words"), rows(__file__, "quotas"))
def test_a_quota_refuses_what_would_exceed_it_with_both_numbers(document, quota, words):
    quotas = Quotas({"team-a": TenantQuota(**quota)}, [document("one"), document("two")], {"team-a": 3 << 30})
    assert quotas.refusal(document("three")) == words
    assert quotas.refusal(document("x").model_copy(update={"tenant": "without-a-quota"})) == ""


class Meter:
    """A pacing whose tenant uses a given number of tokens and trainer seconds each second."""

    def __init__(self, **quota) -> None:
        self.pacing, self.quota = Pacing(), TenantQuota(**quota)
        self.total, self.now = (0.0, 0.0), 0.0

    def run(self, seconds: int, tokens: float = 0.0, trainer_s: float = 0.0) -> int:
        """Return the number of seconds in which the tenant paused; it uses nothing then."""
        paused = 0
        for _ in range(seconds):
            self.now += 1.0
            gained = (0.0, 0.0) if self.pacing.reason("a") else (tokens, trainer_s)
            paused += gained == (0.0, 0.0)
            self.total = self.total[0] + gained[0], self.total[1] + gained[1]
            self.pacing.update({"a": self.quota}, {"a": gained}, self.now)
        return paused


def test_a_tenant_below_its_rates_never_pauses():
    assert Meter(tokens_per_second=100.0, trainer_seconds_per_hour=1800.0).run(3600, 99.0, 0.49) == 0


@pytest.mark.parametrize(("quota", "allowed", "words"), rows(__file__, "rates"))
def test_a_tenant_above_a_rate_pauses_until_its_average_is_the_rate(quota, allowed, words):
    meter, which = Meter(**quota), "trainer_seconds_per_hour" in quota
    meter.run(3600, 400.0, 1.0)
    before = meter.total[which]
    meter.run(3600, 400.0, 1.0)
    assert meter.total[which] - before == pytest.approx(allowed, rel=0.02)
    while not meter.pacing.reason("a"):
        meter.run(1, 400.0, 1.0)
    begins = "it begins no new tasks until the average is lower, in about 1 minute"
    assert meter.pacing.reason("a") == f"over quota of tenant a: more than {words} on average; {begins}"


def limited(document: JobDocument, **limits) -> JobDocument:
    return document.model_copy(update={"tenant_quota": TenantQuota(**limits), "tenant_weight": 3.0})


def test_the_job_that_others_wait_for_is_named_as_soon_as_a_step_of_it_is_known(document):
    texts, first = QuotaMessages(), Progress.model_construct(namespace="team-a", job="first", uid="u", step=1, steps=3)
    assert texts.message(document("second"), "over quota", {"u": None}, 0.0) == "over quota"
    told = texts.message(document("second"), "over quota", {"u": first}, 0.0)
    assert told == "over quota; waits for team-a/first, 1 of 3 steps"


async def test_a_quota_queues_a_job_and_a_raised_one_admits_it_without_restarting_the_first(harness, document):
    await harness.put_report(slots=8, max_rank=16)
    first, second = limited(document("first"), jobs=1), limited(document("second", created_at=1.0), jobs=1)
    async with harness.orchestrating():
        await harness.submit(first)
        await harness.progress(first, lambda level: level.admitted)
        await harness.submit(second)
        wanted = "over quota: 1 of 1 jobs; waits for team-a/first, 0 of 3 steps"
        level = await harness.progress(second, lambda level: level.message == wanted)
        assert (level.phase, level.reason, level.admitted) == (Phase.QUEUED, "OverQuota", False)
        began = (await harness.progress(first, lambda level: True)).admitted_at
        await harness.submit(limited(second, jobs=2))
        await harness.progress(second, lambda level: level.admitted)
        assert (await harness.progress(first, lambda level: True)).admitted_at == began


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


async def test_past_use_is_written_and_read_by_the_next_orchestrator(harness, document):
    await harness.put_report(slots=8, max_rank=16, kv_tokens=1)
    job = document()
    async with harness.orchestrating("one"):
        await harness.submit(job)
        await harness.progress(job, lambda level: level.admitted)
        record = await harness.wait_for(PastUses, subjects.TENANTS, subjects.PAST_USE, lambda found: found.use)
    assert record.use["team-a"] >= 60.0, "its entry, at least"
    queue = AdmissionQueue()
    use = TenantUse(harness.bus, queue)
    await use.load()
    assert queue.past.of("team-a") >= record.use["team-a"]
    assert queue.past.at is not None

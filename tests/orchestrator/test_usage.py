"""Use of jobs from the totals that replicas report: each token once, whatever is restarted."""

import pytest
from tests.harness import a_progress, a_turn, an_episode, identity, job_document
from tests.orchestrator.harness import run_to_end
from tests.tables import rows

from marlaas_api import subjects
from marlaas_api.messages import Episode, Meter, Phase, Progress, ReplicaReport, UsageAmounts
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import PREEMPTION_STRIDE, episode_id
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator import metering as metering_module
from marlaas_worker.orchestrator.experience import CompleteGroup, Experience
from marlaas_worker.orchestrator.metering import Metering
from marlaas_worker.orchestrator.tenant_accounts import TenantAccounts, summed
from marlaas_worker.orchestrator.usage import JobUsage

POLICY = (AgentSettings(name="policy"),)


def test_a_job_that_goes_on_counts_every_total_of_a_replica_once(document):
    """Replicas report totals since their start, in which its published progress is contained in part."""

    def report(replica: str, tokens: int) -> ReplicaReport:
        used = {"job_tokens": tokens, "job_engine_s": tokens / 10}
        cut = {"job_preempted_tokens": tokens // 2, "job_preempted_engine_s": tokens / 20}
        slots = {"agent_slot_s": {"policy": tokens / 5, "critic": tokens / 2}}
        figures = {name: {job.uid: value} for name, value in (used | cut | slots).items()}
        return ReplicaReport(role="rollout", pool="tiny", replica=replica, **figures)

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
    assert (restarted.tokens.total, restarted.preempted_tokens.total) == (1040, 520)
    assert restarted.preempted_engine_s.total == 52.0


def test_what_the_engines_generated_beyond_the_records_is_open_until_the_job_ends(document):
    seconds = {"trainer_s": 2.0, "sandbox_s": 4.0, "slot_s": 0.5}
    recorded = UsageAmounts(generated_tokens=30, trained_tokens=30, stored_bytes=7, **seconds)
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


async def test_use_that_a_replica_reports_after_the_end_of_a_job_counts(harness, document):
    job = document()
    ended = await run_to_end(harness, job)
    used = {"job_tokens": {job.uid: 40}, "job_engine_s": {job.uid: 2.5}, "agent_slot_s": {job.uid: {"policy": 99.0}}}
    await harness.put_report(**used)
    async with harness.orchestrating():
        last = await harness.progress(job, lambda found: found.accelerator_s > 0)
    assert (last.phase, last.finished_at, last.accelerator_s) == (Phase.SUCCEEDED, ended.finished_at, 2.5)
    assert last.amounts.unrecorded_tokens == 40


@pytest.fixture
async def record(harness, document):
    """Record the turns of one play; tokens: generated by each. Every prompt has 20 tokens, 16 of them cached."""

    async def turns(index: int, member: int, *tokens: int, attempt: int = 1, **fields: str | int) -> Episode:
        one = an_episode(document(), index, member, duration_s=0.5, rewards={"policy": float(member)})
        one = one.model_copy(update={"episode": episode_id(one.group, member, attempt)})
        for number, generated in enumerate(tokens):
            meter = Meter(prompt_tokens=20, cached_tokens=16, output_tokens=generated, share_s=0.25)
            place = {"group": one.group, "member": member, "episode": one.episode}
            turn = a_turn(number, number - 1 if number else None, **identity(one), **place, meter=meter, **fields)
            await harness.bus.publish(subjects.turn(one.namespace, one.job, one.episode, number), encode(turn))
        return one

    return turns


def complete(*episodes: Episode, size: int = 2) -> CompleteGroup:
    experience = Experience(POLICY, size)
    *_, group = (experience.add(episode) for episode in episodes)
    assert group is not None
    return group


async def used_of(harness, document, players, group: CompleteGroup) -> dict[str, UsageAmounts]:
    context = await harness.context("orchestrator")
    (amounts,) = (await Metering(context.bus, context.blobs, document.ref, players).of_groups([group])).values()
    return dict(amounts)


@pytest.mark.parametrize(("players", "speakers", "expected"), rows(__file__, "usage"))
async def test_usage_is_counted_for_the_policy_that_was_played(harness, document, record, players, speakers, expected):
    group = complete(await record(0, 0, 1, agent=speakers[0]), await record(0, 1, 10, agent=speakers[1]))
    agents = [AgentSettings.model_validate(one) for one in players]
    used = (await used_of(harness, document(), agents, group)).items()
    found = {name: [one.generated_tokens, one.open_tokens, one.frozen_tokens, one.sandbox_s] for name, one in used}
    assert found == expected


@pytest.mark.parametrize("most_plays", [metering_module.MAX_PLAYS, 0])
async def test_of_the_plays_before_a_preemption_the_last_was_cut(harness, document, record, monkeypatch, most_plays):
    """A preemption is one that the rollout role has recorded, whatever the names of attempts say."""
    monkeypatch.setattr(metering_module, "MAX_PLAYS", most_plays)
    await record(0, 0, 1, attempt=1)
    await record(0, 0, 10, 20, attempt=2)
    await record(0, 0, 100, attempt=PREEMPTION_STRIDE + 1, num_preemptions=1)
    await record(0, 0, 1000, attempt=2 * PREEMPTION_STRIDE + 1, num_preemptions=2)
    one = await record(0, 0, 7, attempt=2 * PREEMPTION_STRIDE + 2, num_preemptions=2)
    await record(0, 1, 10_000, attempt=1)
    feigned = await record(0, 1, 8, attempt=PREEMPTION_STRIDE + 1)
    ended = await record(0, 2, 9)
    again = await record(0, 2, 100_000, attempt=PREEMPTION_STRIDE + 1, num_preemptions=1)
    amounts = (await used_of(harness, document(), POLICY, complete(one, ended, again, feigned, size=3)))["policy"]
    assert amounts.open_tokens == 7 + 8 + 9
    assert amounts.failed_tokens == 1 + 1000 + 10_000
    assert amounts.preempted_tokens == 10 + 20 + 100 + 100_000
    assert (amounts.repeated_tokens, amounts.charged_tokens) == (0, 24 + 11_001)
    assert (amounts.engine_s, amounts.preempted_engine_s) == (10 * 0.25, 4 * 0.25)
    assert (amounts.prompt_tokens, amounts.cached_tokens) == (6 * 20, 6 * 16), "without plays that were cut"


def a_level(job: str, trained: int, tenant: str = "acme", **fields: object) -> Progress:
    used = UsageAmounts(generated_tokens=trained, trained_tokens=trained, trainer_s=1.0, stored_bytes=99)
    return a_progress(job_document(job), tenant=tenant, usage={"policy": used}, trainer_s=1.0, **fields)


async def test_the_totals_of_tenants_are_the_sums_of_their_jobs(harness):
    levels = [a_level("a", 1), a_level("b", 20, tokens=25), a_level("c", 300, "team-a"), a_level("d", 4000, "")]
    totals = {name: account.total for name, account in summed({}, levels).items()}
    assert list(totals) == ["acme", "team-a", "tenant/default"]
    assert (totals["acme"].trained_tokens, totals["acme"].open_tokens) == (21, 5)
    assert totals["acme"].trainer_s == 2.0
    assert totals["team-a"].trained_tokens == 300
    assert totals["tenant/default"].trained_tokens == 4000, "no Tenant has the namespace"
    everything = sum((level.amounts for level in levels), UsageAmounts())
    assert sum(totals.values(), UsageAmounts()) == everything
    accounts = TenantAccounts(harness.bus)
    await accounts.save(levels, 100.0)
    await accounts.load()
    assert accounts.totals() == totals


async def test_a_deleted_job_counts_once_however_often_its_deletion_is_repeated(harness):
    gone, stays = a_level("a", 1, tokens=8, preempted_tokens=3, admitted_s=3.0), a_level("b", 20)
    accounts = TenantAccounts(harness.bus)
    await accounts.save([gone, stays], 100.0)
    assert accounts.totals()["acme"].open_tokens == 4
    for _ in range(2):
        await accounts.close(gone, {"uid-a", "uid-b"})
    await accounts.save([gone, stays], 200.0)
    restarted = TenantAccounts(harness.bus)
    await restarted.load()
    await restarted.close(gone, {"uid-a", "uid-b"})
    await restarted.save([stays], 200.0)
    total = restarted.totals()["acme"]
    assert (total.trained_tokens, total.open_tokens, total.unrecorded_tokens, total.generated_tokens) == (21, 0, 4, 28)
    assert total.charged_tokens == 25, "without what a preemption cut"
    assert (total.stored_bytes, total.admitted_s, total.trainer_s) == (99, 3.0, 2.0)

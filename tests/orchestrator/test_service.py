"""The orchestrator's own process over the bus fake, with a hand-written sandbox and trainer that do just what the messages say."""

import asyncio

import pytest
from tests.harness import a_progress, changed, working
from tests.killing import kill_at
from tests.orchestrator.harness import SEAMS, OrchestratorHarness, final, mixed, run_to_end, running
from tests.tables import rows

from marlaas_api import failpoints, messages, subjects
from marlaas_api.blobs import BlobRef, BlobRefused
from marlaas_api.names import Split, train_group
from marlaas_api.reasons import Reason
from marlaas_api.wire import decode, decode_as


@pytest.mark.parametrize(("staleness", "refuse_every"), [(0, 0), (1, 0), (3, 0), (1, 31)])
async def test_a_job_runs_to_its_end_every_index_once_every_step_full(harness, document, staleness, refuse_every):
    """A bus that answers only now and then delays it, but changes nothing."""
    job = document(maxStaleness=staleness, steps=5)
    harness.refuse_every = refuse_every
    level = await run_to_end(harness, job)
    assert (harness.refused > 3) is (refuse_every > 0)
    harness.refuse_every = 0
    assert (level.phase, level.step, level.versions) == (messages.Phase.SUCCEEDED, 5, {"policy": 5})
    assert level.eval_before is not None
    assert level.promoted == {"policy": 5}
    assert [step for step, _ in harness.trained] == [0, 1, 2, 3, 4]
    names = harness.trained_groups
    assert len(names) == len(set(names)) == 10
    records = await harness.steps(job)
    assert [record.step for record in records] == [0, 1, 2, 3, 4]
    assert all(record.staleness_max <= staleness for record in records)
    assert records[0].metrics == {"loss": 0.5, "train_s": 1.5}
    stored = await harness.bus.replay(subjects.STEPS, "eval.team-a.sums.*")
    evaluated = [decode_as(messages.EvalRecord, one.data).step for one in stored]
    assert evaluated == [0, 2, 4, 5] if staleness == 0 else (evaluated[0], evaluated[-1]) == (0, 5)
    reader = await harness.bus.position(subjects.EPISODES, subjects.consumer("team-a", job.job, "orchestrator"))
    assert staleness or reader.num_behind == 0, "each episode is acked"


async def test_asynchronous_agents_train_later_groups_while_an_earlier_one_is_played(harness, document):
    """In index order, as in strict mode, no group would be given to a trainer, and no step would close."""
    agents = ("solver", "verifier")
    job = document(maxStaleness=1, agents=[{"name": name} for name in agents])
    harness.withheld = (0, 2, 3)
    async with running(harness, job, mixed):
        decided = await harness.decision(job, "reader")
        for agent in agents:
            (ready,) = (part for part in decided.ready if part.agent == agent)
            assert (ready.index, ready.step, ready.position) == (1, 0, 0)
        harness.withheld = (0,)
        await harness.progress(job, lambda level: level.step >= 1)
        first = {train_group(job.ref, index) for index in (await harness.steps(job))[0].indices}
        assert [set(names) for step, names in harness.trained if step == 0] == [first] * 2, "each agent"
        assert train_group(job.ref, 0) not in first
        harness.withheld = ()
        level = await harness.progress(job, final)
    assert (level.phase, level.versions) == (messages.Phase.SUCCEEDED, dict.fromkeys(agents, 3))
    records = await harness.steps(job)
    assert all(record.staleness_max <= 1 for record in records)
    indices = [index for record in records for index in record.indices]
    assert len(indices) == len(set(indices))


async def test_what_loading_left_behind_is_an_event_once_and_records_name_the_data(harness, document):
    harness.load_notes, harness.data_digest = ("loading leaves a file open",), "d1"
    await run_to_end(harness, job := document(steps=1), lambda task, member: float(member))
    assert [one.plays.data_digests for one in await harness.steps(job)] == [("d1",)]
    stored = await harness.bus.replay(subjects.STEPS, subjects.evaluation(job.namespace, job.job, job.uid, 0))
    assert [decode_as(messages.EvalRecord, one.data).data_digests for one in stored] == [("d1",)]
    stored = await harness.bus.replay(subjects.EVENTS, subjects.event(job.namespace, job.job, ">"))
    events = [event for event in (decode(one.data) for one in stored) if event.reason == "EnvironmentLoaded"]
    assert [one.message for one in events] == ["loading leaves a file open"]


async def test_a_solved_job_finishes_with_counted_steps_and_no_new_version(harness, document):
    level = await run_to_end(harness, job := document(steps=3), lambda task, member: 1.0)
    assert (level.phase, level.step, level.versions) == (messages.Phase.SUCCEEDED, 3, {"policy": 0})
    records = await harness.steps(job)
    assert [(one.outcome, one.num_zero_variance) for one in records] == [(messages.StepOutcome.NO_OP, 4)] * 3


@pytest.mark.parametrize(("fault", "reason", "words"), rows(__file__, "failing_environments"))
async def test_an_environment_that_always_fails_fails_the_job_in_its_words(harness, document, fault, reason, words):
    harness.fault = fault
    level = await run_to_end(harness, document(), lambda task, member: None)
    assert (level.phase, level.reason) == (messages.Phase.FAILED, reason)
    assert words in level.message


@pytest.mark.parametrize(("admitted_s", "reason"), [(10.0, "Finished"), (4000.0, "DeadlineExceeded")])
async def test_only_the_time_of_admission_counts_against_a_jobs_deadline(harness, document, admitted_s, reason):
    job = changed(document(steps=1), active_deadline_seconds=3600.0)
    before = {"phase": messages.Phase.SUSPENDED, "admitted": False, "reason": "Suspended", "started_at": 1.0}
    await harness.put(subjects.PROGRESS, job.ref.key, a_progress(job, **before, admitted_s=admitted_s))
    level = await run_to_end(harness, job)
    assert (level.reason, level.admitted_s >= admitted_s) == (reason, True)


def uneven(task: messages.TaskMessage, member: int) -> float | None:
    """Group 0 has no signal, one member of group 3 has a fault, and all others are to be trained."""
    if task.split is Split.TRAIN and task.index == 3 and member:
        return None
    return float(member == 0 or task.index == 0)


def by_hand(groups: int, evaluations: int) -> messages.UsageAmounts:
    """Usage of a run of `uneven` whose episodes have one turn of 5 tokens. Evaluations have two tasks."""
    return messages.UsageAmounts(
        prompt_tokens=20 * 2 * (groups + evaluations),
        cached_tokens=16 * 2 * (groups + evaluations),
        generated_tokens=5 * 2 * (groups + evaluations),
        trained_tokens=5 * 2 * (groups - 2),
        evaluation_tokens=5 * 2 * evaluations,
        zero_variance_tokens=5 * 2 + 5,
        failed_tokens=5,
        trainer_s=1.5 * 3,
    )


@pytest.mark.parametrize(
    ("staleness", "passes"),
    [*((staleness, (passed,)) for staleness in (0, 1) for passed in (1, 3, 5)), (0, range(1, 99, 2))],
)
@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_it_loses_and_doubles_nothing(harness, document, seam, passes, staleness):
    harness.meter, harness.turn_bytes = messages.Meter(prompt_tokens=20, cached_tokens=16, output_tokens=5), 8
    job = document(maxStaleness=staleness, steps=3)
    passed = kill_at(seam, *passes)
    level = await run_to_end(harness, job, uneven)
    assert harness.deaths == [seam] * sum(number <= passed.count(seam) for number in passes)
    assert (level.phase, level.step, level.versions) == (messages.Phase.SUCCEEDED, 3, {"policy": 3})
    names = harness.trained_groups
    assert len(names) == len(set(names)) == 6
    records = await harness.steps(job)
    assert [record.step for record in records] == [0, 1, 2]
    indices = [index for record in records for index in record.indices]
    assert len(indices) == len(set(indices)) >= 8
    assert all(f"t{index}" not in name for index in (0, 3) for name in names), "no signal, and a fault"
    log = await harness.bus.replay(subjects.GROUPS, subjects.job_log("team-a", job.job))
    (entry,) = (decode(one.data) for one in log)
    assert (type(entry), entry.open) == (messages.IssueLedger, ()), "what is on record is purged"
    assert (level.faults, level.usage["policy"].trained_tokens) == ({"env": 1}, 60)
    assert records[1].reward_mean == 0.6 or staleness, "the fault is not scored"
    if staleness == 0:
        assert sorted(indices) == list(range(8))
        assert level.usage == {"policy": by_hand(groups=8, evaluations=3)}


@pytest.mark.parametrize("deaths", [2, 1000])
async def test_what_nobody_foresaw_is_one_jobs_own_and_it_may_recover(harness, document, deaths):
    mine, ill = document(), document("ill", steps=1)
    died = 0

    def hook(name: str) -> None:
        nonlocal died
        task = asyncio.current_task()
        if task.get_name() == "job team-a/ill" and died < deaths:
            died += 1
            raise OverflowError("intermediate overflow in fsum")

    failpoints.hook = hook
    async with running(harness, mine, mixed):
        await harness.submit(ill)
        async with working(harness.play(ill, mixed), harness.train(ill)):
            level = await harness.progress(mine, final)
            ended = await harness.progress(ill, final)
    assert level.phase is messages.Phase.SUCCEEDED
    if deaths == 2:
        assert ended.phase is messages.Phase.SUCCEEDED
    else:
        assert (ended.phase, ended.reason, died) == (messages.Phase.FAILED, "BrokenInvariant", 3)
        assert "crashed 3 times in a row; the last error: OverflowError" in ended.message


async def test_a_job_that_every_trainer_has_given_up_fails_in_the_trainers_words(harness, document):
    job = document(steps=100_000)
    async with running(harness, job, mixed):
        await harness.progress(job, lambda level: level.step >= 1)
        broken = {f"{job.uid}.policy": "turn 3 carries version 9"}
        await harness.put_report("trainer", "t0", broken=broken)
        await harness.put_report("trainer", "t1")
        level = await harness.progress(job, lambda level: level.step >= 3)
        assert not level.phase.final, "another trainer may still take it"
        await harness.put_report("trainer", "t1", broken=broken)
        level = await harness.progress(job, final)
    assert (level.phase, level.reason) == (messages.Phase.FAILED, "TrainingFailed")
    assert level.message == "turn 3 carries version 9"


async def test_suspended_then_resumed_and_given_more_steps_it_ends_as_if_nothing_had_happened(harness, document):
    job = document(steps=18)
    harness.pause_after = 2
    async with running(harness, job, mixed):
        await harness.progress(job, lambda level: level.step >= 1)
        await harness.submit(suspended := changed(job, suspend=True))
        await harness.progress(job, lambda level: level.phase is messages.Phase.SUSPENDED)
        harness.may_train.set()
        await harness.submit(resumed := changed(suspended, suspend=False))
        await harness.progress(job, final)
        more = {"training": job.spec.training.model_copy(update={"steps": 20})}
        await harness.submit(changed(resumed, **more))
        level = await harness.progress(job, lambda level: level.phase.final and level.step == 20)
    assert (level.phase, level.step) == (messages.Phase.SUCCEEDED, 20)
    names = harness.trained_groups
    assert len(names) == len(set(names)) == 40


async def test_a_job_whose_versions_have_no_slot_is_pinned_to_the_newest(tmp_path, document):
    """A replica loads a version when a turn needs it. If the job waited for that, no turn would come."""

    class Unloaded(OrchestratorHarness):
        async def report(self, document: messages.JobDocument, version: int) -> None:
            await self.put_report(slots=8, max_rank=16)

    harness, job = Unloaded(tmp_path), document(maxStaleness=1)
    await harness.bus.ensure()
    assert (await run_to_end(harness, job)).phase is messages.Phase.SUCCEEDED
    entries = await (await harness.bus.bucket(subjects.PINS)).entries()
    pins = {entry.key: decode_as(messages.Pin, entry.data).version for entry in entries}
    for step, groups in harness.trained:
        for group in groups:
            assert step - 1 <= pins[subjects.pin_key("team-a", job.job, "policy", group)] <= step


async def test_what_it_cannot_read_ends_nothing(harness, document):
    job = document(steps=2)
    for bucket, key in (
        (subjects.REPLICAS, "trainer.tiny.newer"),
        (subjects.JOBS, "team-a.newer"),
        (subjects.PROGRESS, "a.b"),
    ):
        await (await harness.bus.bucket(bucket)).put(key, b"of a later release")
    level = await run_to_end(harness, job)
    assert (level.phase, level.step) == (messages.Phase.SUCCEEDED, 2)


@pytest.mark.parametrize("deadline_s", [None, 20])
async def test_a_store_that_refuses_is_told_and_the_deadline_ends_a_job(harness, document, deadline_s, monkeypatch):
    job = document(steps=2)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"active_deadline_seconds": deadline_s})})

    async def refuse(_: BlobRef) -> bytes:
        raise BlobRefused("403 AccessDenied")

    with monkeypatch.context() as patch:
        patch.setattr(harness.blobs, "get", refuse)
        async with running(harness, job, mixed):
            told = await harness.progress(job, lambda found: found.reason == Reason.STORE_REFUSED)
            assert told.message.startswith("orchestrator: 403 AccessDenied; since ")
            if deadline_s is None:
                patch.undo()
            ended = await harness.progress(job, final)
    succeeded, late = (messages.Phase.SUCCEEDED, "Finished"), (messages.Phase.FAILED, "DeadlineExceeded")
    assert (ended.phase, ended.reason) == (succeeded if deadline_s is None else late)


async def test_a_job_whose_progress_a_newer_release_wrote_keeps_everything_although_it_is_deleted(harness, document):
    job = document(steps=2)
    await run_to_end(harness, job)
    progress, blobs = await harness.bus.bucket(subjects.PROGRESS), dict(harness.blobs.contents)
    await progress.put(job.ref.key, b"of a later release")
    await harness.submit(job.model_copy(update={"deleted": True}))
    async with harness.orchestrating():
        other = document("other")
        await harness.submit(other)
        await harness.progress(other, lambda found: True)
    assert await harness.steps(job)
    assert (await progress.get(job.ref.key)).data == b"of a later release"
    assert blobs.items() <= harness.blobs.contents.items()

"""What an orchestrator makes of a job that another one has left half-way, perhaps long ago."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from tests.harness import a_step, a_turn, an_episode, identity, working
from tests.killing import kill_at
from tests.orchestrator.harness import ADMITTED, SEAMS, OrchestratorHarness, final, mixed, run_to_end

from marlaas_api import subjects
from marlaas_api.messages import (
    EvaluationBegun,
    IssueLedger,
    JobAgent,
    JobDocument,
    Phase,
    Pin,
    PolicyRecord,
    TaskMessage,
    TasksIssued,
)
from marlaas_api.names import Split, eval_group, train_group
from marlaas_api.wire import encode, pack
from marlaas_worker.orchestrator import records
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.records import Records
from tests import virtual_time


@contextlib.asynccontextmanager
async def given_out(harness: OrchestratorHarness, job: JobDocument) -> AsyncIterator[None]:
    """A job whose first groups are in the queue, and whose orchestrator is gone; its trainer lives."""
    await harness.report(job, -1)
    await harness.submit(job)
    async with working(harness.train(job)):
        async with harness.orchestrating():
            name, subject = subjects.consumer("team-a", job.job, "sandbox"), subjects.task("team-a", job.job)
            queue = await harness.bus.consumer(subjects.TASKS, name, subject)
            training = job.spec.training
            for _ in range(training.groups_per_step * (1 + training.max_staleness) + job.spec.evaluation.tasks):
                (delivery,) = await queue.fetch(1, 30.0)
                await delivery.nak(1.0)
        yield


async def played(harness: OrchestratorHarness, job: JobDocument, member: int, version: int) -> None:
    """A member of the first group has ended: one turn, sampled from this version, and its episode."""
    ended = an_episode(job, 0, member, rewards={"policy": float(member)}, leaves={"policy": (0,)})
    place = ended.model_dump(include={"group", "member", "episode"})
    turn = a_turn(**identity(job), **place, version=version)
    await harness.bus.publish(subjects.turn("team-a", job.job, ended.episode, 0), encode(turn))
    await harness.bus.publish(subjects.episode("team-a", job.job), encode(ended))


async def pinned_again(harness: OrchestratorHarness, key: str) -> int:
    """Forget a pin, and wait until it is made anew; its version."""
    await (await harness.bus.bucket(subjects.PINS)).delete(key)
    return (await harness.wait_for(Pin, subjects.PINS, key, lambda pin: True)).version


async def test_the_ledger_of_a_log_is_the_newest_with_all_that_was_issued_later(harness, document, monkeypatch):
    """Entries that are too large for a message are in the store."""
    job, context = document(), await harness.context("orchestrator-0")
    names = identity(job)
    monkeypatch.setattr(records, "pack", lambda entry, blobs, _: pack(entry, blobs, 1))
    ledger = IssueLedger(**names, next_index=5, open=(3, 4), open_from=(7,), evaluating=1)
    entries = [
        TasksIssued(**names, indices=(1,), next_index=2),
        ledger,
        TasksIssued(**names, indices=(5, 6), turns_from=9, next_index=7, skipped_solved=2, past_versions={"o": 3}),
        EvaluationBegun(**names, version=4, step=3, versions={"policy": 4}, turns_from=8),
    ]
    written = Records(context, job)
    await written.history()
    for entry in entries:
        await written.log_issue(entry)
    found = JobState(job, await Records(context, job).history()).ledger()
    later = {"next_index": 7, "skipped_solved": 2, "past_versions": {"o": 3}}
    begun = {"evaluating": 4, "evaluating_step": 3, "evaluating_versions": {"policy": 4}, "evaluating_from": 8}
    assert found == IssueLedger(**names, open=(3, 4, 5, 6), open_from=(7, 1, 9, 9), **later, **begun)
    assert len(harness.blobs.contents) == len(entries)


async def test_a_job_of_a_release_with_another_log_does_not_begin_anew(harness, document):
    job, context = document(), await harness.context("orchestrator-0")
    await harness.bus.publish(subjects.step("team-a", job.job, job.uid, 0), encode(a_step(job, 0)))
    with pytest.raises(AssertionError, match="a job of an earlier release cannot go on"):
        await Records(context, job).history()


async def test_what_the_queue_still_holds_is_not_put_there_again(harness, document):
    job, plays = document(steps=2, maxStaleness=1), Counter()

    def counted(task: TaskMessage, member: int) -> float:
        plays[task.group, member] += 1
        return mixed(task, member)

    async with given_out(harness, job):
        harness.server.clock = lambda: virtual_time.now() + 121  # longer than the queue remembers what it was given
        await harness.report(job, 0)
        async with harness.orchestrating():
            await pinned_again(harness, subjects.pin_key("team-a", job.job, "policy", eval_group(job.ref, 1, 0)))
            async with working(harness.play(job, counted)):
                level = await harness.progress(job, final)
    assert level.phase is Phase.SUCCEEDED
    assert set(plays.values()) == {1}


@pytest.mark.parametrize("newer", [False, True], ids=["half played", "all played, one by a newer version"])
async def test_a_group_keeps_its_oldest_version_although_its_pin_has_expired(harness, document, newer):
    job = document(maxStaleness=1)
    async with given_out(harness, job):
        await played(harness, job, 0, version=int(newer))
        if newer:
            await played(harness, job, 1, version=0)
        await harness.commit(JobAgent(job, job.spec.agents[0]), PolicyRecord(uid=job.uid, version=0), None, ())
        async with harness.orchestrating():
            await harness.progress(job, lambda level: level.versions == {"policy": 1})
            if not newer:
                await played(harness, job, 1, version=0)
            (ready,) = (await harness.decision(job, "reader")).ready
    assert (ready.group, ready.version, ready.base_version) == (train_group(job.ref, 0), 0, 1)


async def test_a_strict_group_still_in_the_queue_is_pinned_again_when_its_pin_has_expired(harness, document):
    job = document(maxStaleness=0)
    key = subjects.pin_key("team-a", job.job, "policy", train_group(job.ref, 0))
    async with given_out(harness, job), harness.orchestrating():
        assert await pinned_again(harness, key) == 0


@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_between_any_two_effects_it_plays_the_same_tasks_in_order(harness, document, tmp_path, seam):
    """Tasks 0 and 1 are solved, 2 is hopeless, the others teach; what teaches nothing rests, and what comes again has its seed."""
    job = document(steps=8, data={"tasks": 6, "order": "shuffled", "skip": {"passes": 2, "maxShare": 0.6}})
    whole, found = OrchestratorHarness(tmp_path / "whole"), []
    await whole.bus.ensure()
    for one in (whole, harness):
        played: dict[str, tuple[int, int]] = {}

        def reward(task: TaskMessage, member: int, played=played) -> float:
            if task.split is Split.TRAIN:
                played[task.group] = (task.index, task.seed)
            return float(task.index < 2 or (task.index > 2 and member == 0))

        level = await run_to_end(one, job, reward)
        told = {"outcome", "version", "indices", "outcomes"}
        steps = [step.model_dump(include=told) for step in await one.steps(job)]
        found.append((level.phase, level.skipped_solved, level.skipped_hopeless, played, steps))
        kill_at(seam, 1 if seam == ADMITTED else 3)
    assert (found[0], harness.deaths) == (found[1], [seam])
    phase, solved, hopeless, played, _ = found[0]
    assert (phase, min(solved, hopeless) > 0) == (Phase.SUCCEEDED, True)
    assert 6 == len(set(played.values())) < len(played), "each task has one seed, and some were played more than once"
    last = max(int(group.rpartition("t")[2]) for group in played)
    assert len(played) + solved + hopeless == last + 1, "gaps are skips"

"""Strict mode with the reference engine: a job makes the same adapters, bit for bit, whatever happens around it: also with three trainers of which one loses an agent, one leaves and one is killed."""

import asyncio
from collections import Counter

import pytest
from tests.killing import Killed
from tests.loop import runs
from tests.loop.harness import JOB_S, Loop
from tests.loop.jobs import TEAM, team
from tests.loop.runs import KILLS, SINGLE, FailingBlobs, other

from marlaas_api import subjects, wire
from marlaas_api.messages import Phase
from marlaas_api.names import group_token
from marlaas_worker.trainer import assignment
from marlaas_worker.trainer.versions import PolicyKey

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

STRICT = ("team", "solo", "bases", "self", "taught", "choose", "judged", "distilled", "again", "twin")
FROZEN = ("judge", "teacher")


def test_roles_were_killed_at_every_failpoint(killed):
    assert Counter(killed.places) == {place: len(passes) for place, passes in KILLS.items()}
    assert min(killed.faults[kind.__name__] for kind in FailingBlobs.KINDS) > 2, "the blob store failed in every way"


@pytest.mark.parametrize("name", STRICT)
def test_killed_at_every_effect_a_job_makes_the_same_adapters_from_the_same_tasks(undisturbed, killed, name):
    """The team also speaks in asyncio tasks instead of threads. `solo` is computed in bfloat16, `bases` on two base models."""
    one, again = undisturbed[name], killed.jobs[name]
    assert [found.progress.phase for found in (one, again)] == [Phase.SUCCEEDED] * 2, again.progress.message
    assert again.weights == one.weights
    for agent, versions in one.weights.items():
        assert len(set(versions)) == (1 if agent in FROZEN else 1 + len(one.steps)), "every step changed the policy"
    played = [
        [(step.step, step.outcome, step.indices, step.outcomes, step.skipped_solved) for step in found.steps]
        for found in (one, again)
    ]
    assert played[1] == played[0]
    assert again.trained == one.trained
    measured = [[step.metrics.get("held_out_loss") for step in found.steps] for found in (one, again)]
    assert measured[1] == measured[0]
    assert [loss is not None for loss in measured[0][:3]] == [*[name == "taught"] * 2, False][: len(one.steps)]


def said(job):
    """The training turns of the plays that count, without the names of the plays, and what they cost."""
    last = {(one.group, one.member): one.episode for one in job.episodes}
    aside = {"meter", "at", "replica", "job", "uid", "group", "episode"}
    return {
        (group_token(turn.group), turn.member, turn.turn): turn.model_dump(exclude=aside)
        for turn in job.training_turns
        if last[turn.group, turn.member] == turn.episode
    }


def test_an_openai_agent_trains_on_the_very_turns_of_its_native_twin(undisturbed, killed):
    native, chat = said(undisturbed["twin"]), said(killed.jobs["twin"])
    assert chat == native
    assert {turn["parent"] for turn in native.values()} >= {None, 0, 1}, "conversations went on, in both branches"


@pytest.mark.parametrize("speaker", TEAM)
def test_an_agent_learns_the_same_bits_as_in_a_job_of_its_own(undisturbed, speaker):
    """Both speak in every episode, independently. The other one is frozen and silent in the job that it is compared with."""
    assert undisturbed[f"only-{speaker}"].weights[speaker] == undisturbed["team"].weights[speaker]


def test_what_sampled_is_what_trained(undisturbed, killed):
    """The trainer's logprobs of the sampled tokens are the engine's, on another base model for each agent too."""
    jobs = [undisturbed["team"], undisturbed["bases"], killed.jobs["bases"], killed.jobs["late"]]
    steps = [one.metrics for job in jobs for found in job.histories.values() for one in found if one.version == 1]
    assert len(steps) == 8
    assert max(metrics["logprob_gap"] for metrics in steps) < 1e-4


def test_among_others_that_join_leave_fail_and_are_preempted_adapters_are_the_same_as_alone(undisturbed, crowd):
    """Those of a team whose agents speak at the same time, and of one of the others."""
    team, single = crowd.jobs["team"], other(SINGLE).job
    assert {name: versions[:3] for name, versions in team.weights.items()} == undisturbed["team"].weights
    assert [len(set(versions)) for versions in team.weights.values()] == [4, 4]
    assert [step.reward_mean for step in team.steps[:2]] == [step.reward_mean for step in undisturbed["team"].steps]
    assert crowd.jobs[single].weights == undisturbed[single].weights
    num_left, num_failed = len(runs.LEFT), len(runs.FAILS)
    finished = runs.NUM_OTHERS - num_left - num_failed
    assert crowd.reasons == {"Finished": finished, "left": num_left, "TooManyFaults": num_failed}
    assert crowd.preempted > {"team"}


def at_commits(patch, agent, disturbances):
    """Call each function once, when an agent's step of its number is about to be committed."""
    commit = PolicyKey.commit

    async def disturbed(policy, lease, contents):
        if policy._assignment.agent.name == agent and (disturb := disturbances.pop(contents.result.step, None)):
            await disturb(policy, lease)
        return await commit(policy, lease, contents)

    patch.setattr(PolicyKey, "commit", disturbed)


async def test_an_agent_whose_trainer_goes_within_a_step_is_continued(undisturbed, tiny_model, tmp_path, monkeypatch):
    holders: list[str] = []

    async def lose(policy, lease):
        """Another trainer binds the agent, and releases it."""
        holders.append(lease.record.holder)
        record = lease.record.model_copy(update={"epoch": lease.record.epoch + 1, "holder": ""})
        await policy._bucket.update(policy._assignment.policy_key, wire.encode(record), lease.revision)

    async def leave(_, lease):
        holders.append(lease.record.holder)
        loop.stop(lease.record.holder)
        await asyncio.Event().wait()  # until it is cancelled

    async def die(_, lease):
        holders.append(lease.record.holder)
        loop.stop(lease.record.holder)
        raise Killed(lease.record.holder)

    monkeypatch.setattr(assignment, "LEASE_GRACE_S", 0.5)
    at_commits(monkeypatch, "verifier", {0: lose, 1: leave, 2: die})
    job = team(steps=4)
    async with Loop({"tiny": tiny_model}, tmp_path, trainers=3) as loop:
        await loop.submit(job)
        await loop.until(lambda: bool(loop.deaths), JOB_S)
        # The dead trainer releases no lease; the others wait until its report has expired.
        await (await loop.bus.bucket(subjects.REPLICAS)).delete(subjects.replica_key("trainer", "tiny", holders[2]))
        ended, epoch = await loop.ended(job), (await loop.record(job, "verifier")).epoch
    assert ended.progress.phase is Phase.SUCCEEDED, ended.progress.message
    assert {name: versions[:3] for name, versions in ended.weights.items()} == undisturbed["team"].weights
    assert [len(set(versions)) for versions in ended.weights.values()] == [5, 5]
    committed = [made.trainer for made in ended.histories["verifier"][1:]]
    assert committed[1] != holders[1]
    assert holders[2] not in committed[2:]
    assert holders[1] not in committed[1:], "it has left"
    assert epoch >= 4, "lost, and bound again after each disturbance"
    assert loop.deaths == [holders[2]]

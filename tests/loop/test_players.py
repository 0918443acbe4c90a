"""Second roles, past versions and candidates, in strict mode: which versions play, what is trained, and the same bits after kills."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from tests.harness import changed
from tests.killing import kill_at
from tests.loop.harness import Loop, document
from tests.trainer.sampler import Sampler
from tests.trainer.test_learner import away

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Phase, StepRecord, Turn
from marlaas_api.messages.agent_settings import FolderRef, PolicySettings
from marlaas_api.messages.job_spec import BaselineSettings
from marlaas_api.names import group_token
from marlaas_api.wire import unpack, unpack_ids, unpack_logprobs
from marlaas_worker.adapters import TENSORS_FILE, read_adapter
from marlaas_worker.trainer.model import BaseModel

pytestmark = pytest.mark.slow


def self_play() -> JobDocument:
    """One policy that plays two roles against one of its past versions; all three speak at the same time."""
    job = document("self", environment="teams:at_once", maxRefill=0, steps=3)
    (solver,) = job.spec.agents
    second = solver.model_copy(update={"name": "second", "policy": PolicySettings(of="policy")})
    past = PolicySettings(of="policy", versions="past", window=1)
    opponent = solver.model_copy(update={"name": "opponent", "policy": past, "trainable": False})
    spec = job.spec.model_copy(update={"agents": (solver, second, opponent)})
    return job.model_copy(update={"spec": spec})


def judged(judge: Path) -> JobDocument:
    """A frozen agent, which plays this adapter, and one that learns."""
    job = document("judged", environment="teams:once", maxRefill=0)
    (learner,) = job.spec.agents
    frozen = learner.model_copy(update={"name": "judge", "trainable": False, "init_from": FolderRef(path=str(judge))})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"agents": (frozen, learner)})})


async def play(
    model: Path, folder: Path, *kill: str, job: JobDocument | None = None
) -> tuple[list[str], list[StepRecord], list[Turn], list[str]]:
    """Run a job; return the weights of all versions, the steps, all turns of training groups, and where roles died."""
    job = job or self_play()
    async with Loop(model, folder) as loop:
        turns: dict[str, Turn] = {}

        async def follow() -> None:
            while True:
                for stored in await loop.bus.replay(subjects.TURNS, subjects.turn(job.namespace, job.job, "*", "*")):
                    turn = await unpack(stored.data, loop.blobs)
                    turns[stored.subject] = turn
                await asyncio.sleep(0.05)

        following = asyncio.create_task(follow())
        if kill:
            kill_at(*kill)
        await loop.submit(job)
        level = await loop.finished(job, 120)
        following.cancel()
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        weights = [one.files[TENSORS_FILE].sha256 for one in (await loop.manifests(job))[::-1]]
        trained = [turn for turn in turns.values() if group_token(turn.group).startswith("t")]
        return weights, await loop.steps(job), trained, loop.deaths


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    """What a run gives when nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(play(tiny_model, tmp_path_factory.mktemp("undisturbed")))


def test_two_roles_play_the_newest_version_and_the_opponent_the_one_before(undisturbed):
    _, steps, turns, _ = undisturbed
    step_of = {index: record.step for record in steps for index in record.indices}
    played = {
        (turn.agent, step_of[int(group_token(turn.group)[1:])], turn.version, turn.adapter_sha256) for turn in turns
    }
    digest = {version: sha256 for agent, _, version, sha256 in played if agent == "policy"}
    expected = {(agent, step, step) for agent in ("policy", "second") for step in range(3)}
    expected |= {("opponent", step, max(0, step - 1)) for step in range(3)}
    assert played == {(agent, step, version, digest[version]) for agent, step, version in expected}


def test_the_policy_has_all_versions_and_the_record_has_each_role(undisturbed):
    weights, steps, _, _ = undisturbed
    assert len(set(weights)) == 4
    for record in steps:
        assert record.version == record.step + 1
        assert {name: one.version for name, one in record.agents.items()} == dict.fromkeys(
            ("policy", "second", "opponent"), record.version
        )
        assert record.usage.keys() == {"policy"}
        used = record.usage["policy"]
        assert 0 < used.frozen_tokens < used.trained_tokens, "only the opponent's tokens are frozen"


@pytest.mark.parametrize(
    "seam", ["orchestrator.issue.after_ledger", "orchestrator.assign.after_log", "trainer.commit.after_set"]
)
async def test_killed_at_a_seam_the_adapters_are_the_same(tiny_model, tmp_path, undisturbed, seam):
    weights, _, _, deaths = await play(tiny_model, tmp_path, seam)
    assert deaths == [seam]
    assert weights == undisturbed[0]


async def test_groups_of_one_with_a_running_mean_give_the_same_adapters_also_after_a_kill(tiny_model, tmp_path):
    """Self-play of two roles. The baseline of each is the mean of its rewards so far, as the records of the steps say."""
    job = self_play()
    training = job.spec.training.model_copy(update={"baseline": BaselineSettings(type="running-mean", decay=0.5)})
    rollout = job.spec.rollout.model_copy(update={"group_size": 1})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training, "rollout": rollout})})
    weights, steps, _, _ = await play(tiny_model, tmp_path / "first", job=job)
    assert len(set(weights)) == 4
    for agent, metric in (("policy", "baseline"), ("second", "baseline_second")):
        first, second, third = (record.agents[agent].reward_mean for record in steps)
        mean = first
        expected = [mean, mean := 0.5 * mean + 0.5 * second, 0.5 * mean + 0.5 * third]
        assert [record.metrics[metric] for record in steps] == pytest.approx(expected)
    again, _, _, deaths = await play(tiny_model, tmp_path / "second", "trainer.commit.after_set", job=job)
    assert deaths == ["trainer.commit.after_set"]
    assert again == weights


async def test_candidates_give_the_same_adapters_also_after_a_kill(tiny_model, tmp_path):
    job = document("choose", environment="teams:choose", maxRefill=0)
    job = changed(job, rollout=job.spec.rollout.model_copy(update={"max_turns": 5}))
    weights, _, turns, _ = await play(tiny_model, tmp_path / "first", job=job)
    assert len(set(weights)) == 3, "every step changed the policy"
    assert {turn.append[-1].content for turn in turns} >= {"act", "act again", "end"}
    ends = Counter(turn.episode for turn in turns if turn.append[-1].content == "end")
    assert set(ends.values()) == {2}, "of each episode, two candidates of the last choice go on"
    again, _, _, deaths = await play(tiny_model, tmp_path / "second", "orchestrator.assign.after_log", job=job)
    assert deaths == ["orchestrator.assign.after_log"]
    assert again == weights


async def test_a_frozen_judge_plays_the_adapter_that_it_was_given_to_the_end(tiny_model, tmp_path):
    """Its recorded logprobs are those of plain transformers with the adapter merged into the weights."""
    judge = away(BaseModel(str(tiny_model)), tmp_path / "judge")
    weights, steps, turns, _ = await play(tiny_model, tmp_path / "run", job=judged(judge))
    said = [turn for turn in turns if turn.agent == "judge"]
    assert len(steps) == len({turn.version for turn in turns if turn.agent == "policy"}) == 2
    assert {(turn.version, turn.adapter_sha256) for turn in said} == {(0, *weights)}
    tensors, config = read_adapter(judge)
    sampler, gaps = Sampler(tiny_model), []
    for adapter in (tensors, {}):
        sampler.merge(adapter, config.scaling)
        gaps.append(max(largest_gap(sampler, turn) for turn in said))
    assert gaps[0] < 1e-3 < 0.1 < gaps[1]


def largest_gap(sampler: Sampler, turn: Turn) -> float:
    """Return how far the logprobs of a turn without parent are from the sampler's, at most."""
    prompt, output = unpack_ids(turn.prompt_ids), unpack_ids(turn.output_ids)
    rows = sampler.logprobs([*prompt, *output], turn.temperature)[len(prompt) - 1 :]
    said = zip(rows, output, unpack_logprobs(turn.logprobs), strict=False)  # after the last token, one more row
    return max(abs(float(row[token]) - logprob) for row, token, logprob in said)

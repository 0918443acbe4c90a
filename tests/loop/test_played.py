"""The examples of teams; second roles, past versions, candidates, resting tasks and unruly agents: which versions play, and which turns are trained."""

import itertools
import shutil
from collections import Counter

import pytest
import torch
from bench.kuhn import SETS
from bench.kuhn_policies import Reader
from bench.policy_reader import PolicyReader
from bench.tic_tac_toe import uniform
from bench.tic_tac_toe_runs import both_marks, policy_of
from tests.harness import changed
from tests.loop.harness import Loop
from tests.loop.jobs import TEAM, UNRULY, document, examples
from tests.trainer.harness import Sampler

from marlaas.envs.kuhn_poker import BET, PLAYERS, move_of, prompt
from marlaas.envs.tic_tac_toe import EMPTY
from marlaas.models.tokenizer import VOCABULARY, TemplateMessage, encode
from marlaas_api.messages import Phase
from marlaas_api.messages.job_spec import ChatTemplateSettings
from marlaas_api.names import group_token
from marlaas_api.wire import unpack_ids, unpack_logprobs
from marlaas_worker.adapters import AdapterConfig, read_adapter, write_adapter
from marlaas_worker.trainer.calibration import batch_of
from marlaas_worker.trainer.model import BaseModel

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_two_roles_play_the_newest_version_and_the_opponent_the_one_before(undisturbed):
    job = undisturbed["self"]
    step_of = {index: record.step for record in job.steps for index in record.indices}
    played = {
        (turn.agent, step_of[int(group_token(turn.group)[1:])], turn.version, turn.adapter_sha256)
        for turn in job.training_turns
    }
    digest = {version: sha256 for agent, _, version, sha256 in played if agent == "policy"}
    expected = {(agent, step, step) for agent in ("policy", "second") for step in range(3)}
    expected |= {("opponent", step, max(0, step - 1)) for step in range(3)}
    assert played == {(agent, step, version, digest[version]) for agent, step, version in expected}


def test_the_record_has_each_role_and_its_baseline_is_the_running_mean_of_its_rewards(undisturbed):
    steps = undisturbed["self"].steps
    for record in steps:
        assert record.version == record.step + 1
        versions = {name: one.version for name, one in record.agents.items()}
        assert versions == dict.fromkeys(("policy", "second", "opponent"), record.version)
        assert record.usage.keys() == {"policy"}
        used = record.usage["policy"]
        assert 0 < used.frozen_tokens < used.trained_tokens, "only the opponent's tokens are frozen"
    for agent, metric in (("policy", "baseline"), ("second", "baseline_second")):
        mean, second, third = (record.agents[agent].reward_mean for record in steps)
        expected = [mean, mean := 0.5 * mean + 0.5 * second, 0.5 * mean + 0.5 * third]
        assert [record.metrics[metric] for record in steps] == pytest.approx(expected)


def test_the_better_candidates_go_on(undisturbed):
    turns = undisturbed["choose"].training_turns
    assert {turn.append[-1].content for turn in turns} >= {"act", "act again", "end"}
    ends = Counter(turn.episode for turn in turns if turn.append[-1].content == "end")
    assert set(ends.values()) == {2}, "of each episode, two candidates of the last choice go on"


def test_a_frozen_judge_plays_the_adapter_that_it_was_given_to_the_end(undisturbed, tiny_model, judge):
    """Its recorded logprobs are those of plain transformers with the adapter merged into the weights."""
    job = undisturbed["judged"]
    said = [turn for turn in job.training_turns if turn.agent == "judge"]
    assert {turn.version for turn in job.training_turns if turn.agent == "policy"} == {0, 1}
    assert {(turn.version, turn.adapter_sha256) for turn in said} == {(0, *job.weights["judge"])}
    tensors, config = read_adapter(judge)
    sampler, gaps = Sampler(tiny_model), []
    for adapter in (tensors, {}):
        sampler.merge(adapter, config.scaling)
        gaps.append(max(largest_gap(sampler, turn) for turn in said))
    assert gaps[0] < 1e-3 < 0.1 < gaps[1]


def test_a_teacher_scores_every_trained_token_under_its_adapter_and_is_charged_for_its_prompts(undisturbed):
    """Its engine computes in bfloat16, so its scores are compared with those of the policy at the same tokens."""
    job = undisturbed["distilled"]
    scores = {(one.episode, one.scores): one for one in job.training_turns if one.scores is not None}
    replies = [one for one in job.training_turns if one.agent == "policy"]
    assert {(one.episode, one.turn) for one in replies} == scores.keys()
    for one in replies:
        assert len(unpack_logprobs(scores[one.episode, one.turn].logprobs)) == len(unpack_ids(one.output_ids))
    first = [one for one in replies if one.version == 0]
    gaps = [
        float(mu) - float(teacher)
        for one in first
        for mu, teacher in zip(
            unpack_logprobs(one.logprobs), unpack_logprobs(scores[one.episode, one.turn].logprobs), strict=True
        )
    ]
    assert job.steps[0].metrics["policy/teacher_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)
    used = [step.usage["teacher"] for step in job.steps]
    assert all(one.prompt_tokens > 0 == one.generated_tokens for one in used)
    assert {episode.may_speak for episode in job.episodes} == {("policy",)}
    assert [step.num_groups for step in job.steps] == [2, 2, 2], "no group is without signal"


def largest_gap(sampler, turn):
    """Return how far the logprobs of a turn without parent are from the sampler's, at most."""
    prompt_ids, output_ids = unpack_ids(turn.prompt_ids), unpack_ids(turn.output_ids)
    rows = sampler.logprobs([*prompt_ids, *output_ids], turn.temperature)[len(prompt_ids) - 1 :]
    said = zip(rows, output_ids, unpack_logprobs(turn.logprobs), strict=False)  # after the last token, one more row
    return max(abs(float(row[token]) - logprob) for row, token, logprob in said)


def test_tasks_come_again_and_some_rest(undisturbed):
    steps = undisturbed["again"].steps
    played = [one.index for step in steps for one in step.outcomes]
    assert len(played) > len(set(played))
    assert set(played) <= set(range(4))
    assert sum(step.skipped_solved + step.skipped_hopeless for step in steps) > 0


def test_an_asynchronous_team_keeps_its_staleness(killed):
    steps = killed.jobs["late"].steps
    assert [step.staleness_max for step in steps][:2] == [0, 1]
    assert steps[2].staleness_max <= 1
    assert all(steps[1].agents[name].staleness_mean > 0 for name in TEAM)


def test_the_others_learn_and_too_many_faults_end_the_job_with_the_last_one(undisturbed):
    """One agent always fails, one is never called, and one floods."""
    progress, steps = undisturbed["unruly"].progress, undisturbed["unruly"].steps
    assert (progress.phase, progress.reason) == (Phase.SUCCEEDED, "Finished"), progress.message
    assert progress.versions == {"steady": 2, "faulty": 0, "silent": 0, "flood": 2}
    assert progress.message == (
        "2 steps, versions steady 2, faulty 0, silent 0, flood 2; "
        "not trained: faulty (all its turns were lost to faults), silent (never called)"
    )
    assert set(progress.faults) == {"env"}
    groups = [index for step in steps for index in step.indices]
    assert progress.faults["env"] >= 2 * 2 * sum(index % 2 for index in groups), "each of 2 members is played twice"
    for step in steps:
        assert [step.agents[name].num_groups for name in UNRULY] == [2, 0, 0, 2]
    usage = progress.usage
    assert usage["flood"].failed_tokens == 0, "it spoke in no task with a fault"
    assert usage["flood"].trained_tokens > usage["steady"].trained_tokens > 0
    assert usage["faulty"].generated_tokens == usage["faulty"].failed_tokens + usage["faulty"].repeated_tokens > 0
    progress = undisturbed["too-unruly"].progress
    assert (progress.phase, progress.reason) == (Phase.FAILED, "TooManyFaults")
    assert "the last one: env: " in progress.message
    assert "KeyError: 'nothing'" in progress.message


def test_the_examples_end_well_with_the_teams_reward_or_opposite_ones(undisturbed):
    ends = [undisturbed[job.job].progress for job in examples()]
    assert [(end.phase, end.faults) for end in ends] == [(Phase.SUCCEEDED, {})] * len(ends), ends
    for step in undisturbed["relay"].steps:
        caller, reader = step.agents["caller"], step.agents["reader"]
        assert caller.reward_mean == reader.reward_mean == step.reward_mean
    for step in undisturbed["kuhn-poker"].steps:
        first, second = (step.agents[agent] for agent in PLAYERS)
        assert first.reward_mean == pytest.approx(-second.reward_mean)
    assert all(step.agents.keys() == {"solver", "verifier"} for step in undisturbed["solver-verifier"].steps)


def test_one_policy_plays_both_marks_and_its_past_is_never_trained(undisturbed, tiny_model):
    job = undisturbed["tic-tac-toe"]
    versions = [step.agents["x"].version for step in job.steps]
    assert versions == [step.agents["o"].version for step in job.steps]
    trained = [step.usage["x"].trained_tokens > 0 for step in job.steps]
    assert versions == list(itertools.accumulate(trained)), (
        "an opening without signal is not replaced: a step may be empty"
    )
    assert any(trained)
    assert sum(step.usage["past"].trained_tokens if "past" in step.usage else 0 for step in job.steps) == 0
    policy = policy_of(PolicyReader(tiny_model), job.files["x"])
    assert 0.0 < sum(policy[EMPTY].values()) < 1.0
    found = both_marks(policy, uniform)
    assert found.won + found.drawn + found.lost + found.illegal == pytest.approx(1.0)


def trained_bets(base, files, known):
    """The probability of a bet in the trainer's own arithmetic: the sum over all tokens that are bets."""
    tensors, config = read_adapter(files)
    adapter = base.attach(config.rank, config.alpha, ())
    adapter.load(tensors)
    asked = [*encode([TemplateMessage("user", prompt(known))])[0], VOCABULARY["<|assistant|>"]]
    bets = [[*asked, number] for text, number in VOCABULARY.items() if len(text) == 1 and move_of(text) == BET]
    with torch.no_grad():
        logprobs = base.logprobs(adapter, batch_of(bets), 1.0).view(len(bets), -1)
    base.detach(adapter)
    return float(logprobs[:, -1].double().exp().sum())


def test_the_policies_of_the_games_players_are_those_of_their_adapters(undisturbed, tiny_model):
    job, reader, base = undisturbed["kuhn-poker"], Reader(tiny_model), BaseModel(str(tiny_model))
    for player, agent in enumerate(PLAYERS):
        policy = reader.policy(job.files[agent], SETS[player])
        assert job.histories[agent][-1].version == 3
        for known in SETS[player][::3]:
            assert policy[known] == pytest.approx(trained_bets(base, job.files[agent], known), abs=1e-5)


def test_before_training_every_move_of_the_tiny_model_is_open(tiny_model):
    """Its first characters are spread over the alphabet, so both moves are sampled everywhere."""
    zero = BaseModel(str(tiny_model)).attach(8, 16, ())
    policy = Reader(tiny_model).policy(write_adapter(zero.tensors(), AdapterConfig(8, 16)), sum(SETS, ()))
    assert 0.1 < min(policy.values()) < max(policy.values()) < 0.9


async def test_builtin_environments_and_openai_agents_train_a_base_model_with_a_builtin_template(tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base", copy_function=shutil.copy)
    (base / "chat_template.jinja").unlink()
    made = [document(one, environment=name, steps=1) for one, name in (("native", "reverse"), ("openai", "twins:chat"))]
    template, tokens = {"chat_template": ChatTemplateSettings(name="chatml")}, list(VOCABULARY)
    async with Loop({"tiny": base}, tmp_path) as loop:
        ended = await loop.play(changed(job, rollout=job.spec.rollout.model_copy(update=template)) for job in made)
    for job in ended.values():
        assert job.progress.phase is Phase.SUCCEEDED
        for turn in job.training_turns:
            text = "".join(tokens[one] for one in unpack_ids(turn.prompt_ids))
            assert (text[-30:], turn.opens_segment) == ("<|end|>\n<|im_start|>assistant\n", turn.parent is None)

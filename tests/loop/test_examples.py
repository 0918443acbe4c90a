"""The examples of teams with few steps, and the policies that the benchmarks compute from their adapters."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from bench.kuhn import SETS
from bench.kuhn_policies import Reader
from bench.policy_reader import PolicyReader
from bench.tic_tac_toe import uniform
from bench.tic_tac_toe_runs import both_marks, policy_of
from tests.loop.harness import Ended
from tests.loop.jobs import examples

from marlaas.envs.kuhn_poker import BET, PLAYERS, move_of, prompt
from marlaas.envs.tic_tac_toe import EMPTY
from marlaas.models.tokenizer import VOCABULARY, TemplateMessage, encode
from marlaas_api.messages import Phase
from marlaas_worker.adapters import AdapterConfig, read_adapter, write_adapter
from marlaas_worker.trainer.calibration import batch_of
from marlaas_worker.trainer.model import BaseModel

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_examples_end_well_without_faults(undisturbed: dict[str, Ended]) -> None:
    ends = [undisturbed[job.job].progress for job in examples()]
    assert [(end.phase, end.faults) for end in ends] == [(Phase.SUCCEEDED, {})] * len(ends), ends


def test_the_agents_of_the_relay_have_the_teams_reward_and_those_of_a_game_opposite_ones(
    undisturbed: dict[str, Ended],
) -> None:
    for step in undisturbed["relay"].steps:
        caller, reader = step.agents["caller"], step.agents["reader"]
        assert caller.reward_mean == reader.reward_mean == step.reward_mean
    for step in undisturbed["kuhn-poker"].steps:
        first, second = (step.agents[agent] for agent in PLAYERS)
        assert first.reward_mean == pytest.approx(-second.reward_mean)
    assert all(step.agents.keys() == {"solver", "verifier"} for step in undisturbed["solver-verifier"].steps)


def test_one_policy_plays_both_marks_and_its_past_is_never_trained(
    undisturbed: dict[str, Ended], tiny_model: Path
) -> None:
    job = undisturbed["tic-tac-toe"]
    assert (
        [step.agents["x"].version for step in job.steps] == [step.agents["o"].version for step in job.steps] == [1, 2]
    )
    assert sum(step.usage["x"].trained_tokens for step in job.steps) > 0
    assert sum(step.usage["past"].trained_tokens if "past" in step.usage else 0 for step in job.steps) == 0
    policy = policy_of(PolicyReader(tiny_model), job.files["x"])
    assert 0.0 < sum(policy[EMPTY].values()) < 1.0
    found = both_marks(policy, uniform)
    assert found.won + found.drawn + found.lost + found.illegal == pytest.approx(1.0)


def trained_bets(base: BaseModel, files: Mapping[str, bytes], known: str) -> float:
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


def test_the_policies_of_the_games_players_are_those_of_their_adapters(
    undisturbed: dict[str, Ended], tiny_model: Path
) -> None:
    job, reader, base = undisturbed["kuhn-poker"], Reader(tiny_model), BaseModel(str(tiny_model))
    for player, agent in enumerate(PLAYERS):
        policy = reader.policy(job.files[agent], SETS[player])
        assert job.histories[agent][-1].version == 3
        for known in SETS[player][::3]:
            assert policy[known] == pytest.approx(trained_bets(base, job.files[agent], known), abs=1e-5)


def test_before_training_every_move_of_the_tiny_model_is_open(tiny_model: Path) -> None:
    """Its first characters are spread over the alphabet, so both moves are sampled everywhere."""
    zero = BaseModel(str(tiny_model)).attach(8, 16, ())
    policy = Reader(tiny_model).policy(write_adapter(zero.tensors(), AdapterConfig(8, 16)), sum(SETS, ()))
    assert 0.1 < min(policy.values()) < max(policy.values()) < 0.9

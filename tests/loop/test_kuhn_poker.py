"""Three steps of examples/agents/kuhn-poker.yaml with the reference engine, and the policies that the bench computes from the adapters."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from bench.kuhn import SETS
from bench.kuhn_policies import Reader
from bench.runs import documents
from tests.harness import job_document
from tests.loop.harness import Loop

from marlaas.envs.kuhn_poker import BET, PLAYERS, move_of, prompt
from marlaas.models.tokenizer import VOCABULARY, TemplateMessage, encode
from marlaas_api.messages import JobDocument, Phase
from marlaas_worker.adapters import AdapterConfig, read_adapter, write_adapter
from marlaas_worker.trainer.calibration import batch_of
from marlaas_worker.trainer.model import BaseModel

pytestmark = pytest.mark.slow
STEPS = 3


def example() -> JobDocument:
    """The example's job with fewer steps and games."""
    _, job = documents("agents/kuhn-poker.yaml")
    spec = job["spec"]
    spec["rollout"]["groupSize"] = 4
    spec["training"] |= {"steps": STEPS, "groupsPerStep": 6}
    spec["evaluation"]["tasks"] = 6
    return job_document("kuhn-poker", uid="kuhn", spec=spec)


def trained_bets(model: Path, files: Mapping[str, bytes], known: str) -> float:
    """The probability of a bet in the trainer's own arithmetic: the sum over all tokens that are bets."""
    base, (tensors, config) = BaseModel(str(model)), read_adapter(files)
    adapter = base.attach(config.rank, config.alpha, ())
    adapter.load(tensors)
    asked = [*encode([TemplateMessage("user", prompt(known))])[0], VOCABULARY["<|assistant|>"]]
    bets = [[*asked, number] for text, number in VOCABULARY.items() if len(text) == 1 and move_of(text) == BET]
    with torch.no_grad():
        logprobs = base.logprobs(adapter, batch_of(bets), 1.0).view(len(bets), -1)
    return float(logprobs[:, -1].double().exp().sum())


async def test_both_agents_are_trained_and_their_policies_are_those_of_their_adapters(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = example()
    async with Loop(tiny_model, tmp_path) as loop:
        await loop.submit(job)
        level = await loop.finished(job, 120)
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        steps = await loop.steps(job)
        newest = {agent: (await loop.history(job, agent))[0] for agent in PLAYERS}
        files = {
            agent: {name: await loop.blobs.get(ref) for name, ref in manifest.files.items()}
            for agent, manifest in newest.items()
        }
    assert [step.indices for step in steps] == [tuple(range(6 * n, 6 * n + 6)) for n in range(STEPS)]
    for step in steps:
        first, second = (step.agents[agent] for agent in PLAYERS)
        assert first.reward_mean == pytest.approx(-second.reward_mean)
    reader = Reader(tiny_model)
    for player, agent in enumerate(PLAYERS):
        policy = reader.policy(files[agent], SETS[player])
        assert newest[agent].version == STEPS
        for known in SETS[player][::3]:
            assert policy[known] == pytest.approx(trained_bets(tiny_model, files[agent], known), abs=1e-5)


def test_before_training_every_move_of_the_tiny_model_is_open(tiny_model: Path) -> None:
    """Its first characters are spread over the alphabet, so both moves are sampled everywhere."""
    zero = BaseModel(str(tiny_model)).attach(8, 16, ())
    policy = Reader(tiny_model).policy(write_adapter(zero.tensors(), AdapterConfig(8, 16)), sum(SETS, ()))
    assert 0.1 < min(policy.values()) < max(policy.values()) < 0.9

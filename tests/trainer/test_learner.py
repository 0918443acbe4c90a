"""One step against a slow loop over plain transformers and peft, and a learner's state out and in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rl.papers import FORMS
from tests.trainer.jobs import assignment_of, job
from tests.trainer.sampler import VOCABULARY
from tests.trainer.slow_step import TEMPERATURE, slow_step

from marlaas_api.messages.job_spec import TrainingSettings
from marlaas_worker.adapters import AdapterConfig, tensor_name, write_adapter
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.trainer.batching import collate, pack
from marlaas_worker.trainer.learner import Learner, loss_config
from marlaas_worker.trainer.lora import WeightsMismatch
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.optimizer import StateInvalid, TrainingState, read_state, write_state
from marlaas_worker.trainer.rows import Segment, chain, pack_prefix_tree


def segments(seed: int, count: int = 6) -> list[Segment]:
    """Segments with one of two prompts each, whose behaviour policy is some way off the model's."""
    draw = np.random.default_rng(seed)
    prompts, made = draw.integers(0, VOCABULARY, (2, 8)), []
    for number in range(count):
        ids = np.concatenate([prompts[number % 2], draw.integers(0, VOCABULARY, draw.integers(1, 12))]).astype(np.int32)
        generated = np.arange(len(ids)) >= draw.integers(1, 9)
        behaviour = np.where(generated, -4.0 * draw.random(len(ids)) - 1.0, 0.0).astype(np.float32)
        made.append(Segment(ids, generated, behaviour, 0, float(draw.normal())))
    return made


def paired(parts: list[Segment]) -> list[Segment]:
    """The same segments, two to a trajectory; the first one's advantage is the trajectory's."""
    tokens = [sum(int(part.generated.sum()) for part in parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return [
        replace(part, trajectory=at // 2, trajectory_tokens=tokens[at // 2], advantage=parts[at - at % 2].advantage)
        for at, part in enumerate(parts)
    ]


def learner_of(base: BaseModel, **training: Any) -> Learner:
    return Learner(base, assignment_of(job(**training)))


def step(
    learner: Learner, parts: list[Segment], version: int = 0, budget: int = 64, pairs_per_token: int = 384
) -> dict[str, float]:
    full, rest = pack([], pack_prefix_tree(parts, pairs_per_token, budget), budget)
    for batch in [*full, rest]:
        learner.accumulate(batch)
    return learner.step(version)


@pytest.mark.parametrize(
    ("algorithm", "ratio", "terms", "parts"),
    [
        *((name, form, (0.0, 0.0), "segments") for form in FORMS for name in ("grpo", "gspo", "rloo")),
        *((name, "proximal", (0.0, 0.0), "segments") for name in ("dapo", "cispo")),
        ("grpo", "behaviour", (0.2, 0.0), "segments"),
        ("grpo", "proximal", (0.3, 0.2), "trajectories of two"),
        ("dr-grpo", "proximal", (0.0, 0.0), "trajectories of two"),
    ],
)
def test_a_step_is_the_one_that_a_slow_loop_over_plain_peft_takes(base, tiny_model, algorithm, ratio, terms, parts):
    (kl, entropy), made = terms, segments(1) if parts == "segments" else paired(segments(1))
    correction = {} if ratio == "proximal" else {"type": "none"}
    job = {"algorithm": algorithm, "ratio": ratio, "correction": correction}
    job |= {"kl": {"coefficient": kl}, "entropy": {"coefficient": entropy}}
    learner = learner_of(base, **job, optimizer={"learningRate": 1e-2, "maxGradNorm": 0.5})
    learner.begin()
    step(learner, segments(0))  # away from the zero adapter, where half of the gradient vanishes
    before = learner.weights()
    fresh = learner_of(base, **job, optimizer={"learningRate": 1e-3, "maxGradNorm": 0.5})
    fresh.restore(before, TrainingState())
    metrics = step(fresh, made)
    settings = {"algorithm": algorithm, "ratio": ratio, "kl": kl, "entropy": entropy, "rate": 1e-3, "max_norm": 0.5}
    expected, norm = slow_step(tiny_model, before, made, settings)
    assert (metrics["kl"] > 0) == (kl > 0)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in fresh.weights().items():
        moved = (value - before[name]).abs().max()
        assert moved > 1e-4
        assert torch.allclose(value, expected[name], atol=2e-5), name


@pytest.mark.parametrize(
    ("algorithm", "ratio", "correction"),
    [
        ("grpo", "proximal", "truncated"),
        ("grpo", "behaviour", "truncated"),
        ("dapo", "proximal", "masked-token"),
        ("gspo", "proximal", "masked-sequence"),
        ("rloo", "proximal", "icepop"),
        ("cispo", "proximal", "none"),
    ],
)
def test_a_step_in_microbatches_is_the_step_of_the_whole_batch(base, algorithm, ratio, correction):
    """Two segments make a trajectory, so that micro-batches cut trajectories."""
    results = []
    job = {"algorithm": algorithm, "ratio": ratio, "correction": {"type": correction}, "entropy": {"coefficient": 0.01}}
    for budget, pairs_per_token in ((1 << 20, 0), (64, 0), (36, 384), (20, 384)):
        learner = learner_of(base, **job, optimizer={"learningRate": 1e-2})
        learner.begin()
        step(learner, paired(segments(0)), 0, budget, pairs_per_token)
        metrics = step(learner, paired(segments(1)), 1, budget, pairs_per_token)
        assert (metrics["computed_tokens"] < metrics["segment_tokens"]) == (pairs_per_token > 0)
        results.append((learner.weights(), metrics))
    (whole, expected), *parts = results
    for found, metrics in parts:
        for name in ("grad_norm", "loss", "sequences", "entropy"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
        assert metrics["microbatches"] > expected["microbatches"] == 1
        assert all(torch.allclose(found[name], value, atol=2e-4) for name, value in whole.items())


def test_a_job_has_its_algorithms_bounds_unless_it_gives_its_own():
    plain = loss_config(TrainingSettings(steps=1, algorithm="dapo"), 40)
    assert (plain.rule, plain.clip_low, plain.clip_high, plain.budget) == (ALGORITHMS["dapo"], 0.2, 0.28, 40)
    assert plain.correction == Bounds("truncated", 2.0, 0.5)
    assert (plain.ratio, plain.kl_estimator, plain.entropy_coefficient) == ("proximal", "k3", 0.0)
    assert loss_config(TrainingSettings(steps=1, algorithm="cispo"), 40).correction.type == "none"
    assert loss_config(TrainingSettings(steps=1, ratio="behaviour"), 40).ratio == "behaviour"
    in_reward = {"steps": 1, "kl": {"coefficient": 0.1, "addedTo": "reward"}}
    config = loss_config(TrainingSettings.model_validate(in_reward), 40)
    assert (config.kl_coefficient, config.kl_estimator) == (0.0, "k1")
    given = {"steps": 1, "algorithm": "cispo", "clip": {"high": 1.0}, "correction": {"type": "icepop", "floor": 0.25}}
    config = loss_config(TrainingSettings.model_validate(given), 40)
    assert (config.clip_low, config.clip_high, config.correction) == (1.0, 1.0, Bounds("icepop", 5.0, 0.25))


def test_an_agents_own_settings_train_as_those_of_a_job_with_the_same(base):
    """Two steps with the agent's rate, clip of the gradient and entropy give the bits of a job that has them for all."""
    own = {"optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}, "entropy": {"coefficient": 0.2}}
    weights = []
    for document in (
        job(agent={"training": own}),
        job(**own),
        job(),
        job(agent={"training": {"optimizer": {"learningRate": 1e-3}}}),
    ):
        learner = Learner(base, assignment_of(document))
        learner.begin()
        step(learner, segments(0))
        step(learner, segments(1), version=1)
        weights.append({name: tensor.numpy().tobytes() for name, tensor in learner.weights().items()})
        learner.close()
    assert weights[0] == weights[1]
    assert len({one[min(one)] for one in weights}) == 3, "the agent's optimizer alone leaves the job's entropy bonus"


def test_a_step_without_tokens_or_of_which_everything_is_masked_moves_nothing(base):
    learner = learner_of(base, correction={"type": "masked-token", "cap": 1.0})
    learner.begin()
    before, parts = learner.weights(), segments(0)
    for part in parts:
        part.behaviour[part.generated] = -90.0
    silent = [Segment(part.ids, np.zeros_like(part.generated), part.behaviour, 0, 1.0) for part in parts]
    masked, none = step(learner, parts), step(learner, silent)
    assert (masked["masked_fraction"], masked["grad_norm"]) == (1.0, 0.0)
    assert (none["tokens"], none["grad_norm"]) == (0.0, 0.0)
    assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_learner_that_is_parked_and_taken_up_goes_on_to_the_same_bits(base, tiny_model, kl):
    settings: dict[str, Any] = {"kl": {"coefficient": kl}, "optimizer": {"learningRate": 3e-3, "warmupSteps": 3}}
    straight = learner_of(base, **settings)
    straight.begin()
    for version in range(4):
        step(straight, segments(version), version)
    parked = learner_of(base, **settings)
    parked.begin()
    for version in range(2):
        step(parked, segments(version), version)
    weights, state = parked.weights(), write_state(parked.state(1, ("g2", "g3")))
    parked.close()
    taken_up = learner_of(BaseModel(str(tiny_model)), **settings)
    taken_up.restore(weights, read_state(state))
    for version in range(2, 4):
        step(taken_up, segments(version), version)
    assert write_state(taken_up.state(3, ())) == write_state(straight.state(3, ()))
    assert all(torch.equal(value, taken_up.weights()[name]) for name, value in straight.weights().items())


def away(base: BaseModel, folder: Path, rank: int = 8) -> Path:
    """A folder with an adapter that is not the zero adapter."""
    attached = base.attach(rank, 16, ())
    draw = torch.Generator().manual_seed(4)
    start = {name: 0.05 * torch.randn(value.shape, generator=draw) for name, value in attached.parameters.items()}
    folder.mkdir()
    for name, data in write_adapter(start, AdapterConfig(rank, 16)).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("where", ["initFrom", "kl.reference"])
def test_an_adapter_as_kl_reference_is_kept_with_the_job_whatever_becomes_of_its_folder(base, tmp_path, where):
    """Version 0 is its own reference; a frozen adapter is away from it."""
    path = {"path": str(away(base, tmp_path / "start"))}
    kl = {"coefficient": 0.1, "reference": path} if where == "kl.reference" else {"coefficient": 0.1}
    document = job(agent={"initFrom": path} if where == "initFrom" else {}, kl=kl)
    learner, again = Learner(base, assignment_of(document)), Learner(base, assignment_of(document))
    learner.begin()
    assert (step(learner, segments(0))["kl"] > 1e-6) == (where == "kl.reference")
    (tmp_path / "start" / "adapter_model.safetensors").unlink()
    again.restore(learner.weights(), read_state(write_state(learner.state(0, ()))))
    kls = [step(each, segments(1), 1)["kl"] for each in (learner, again)]
    assert kls[0] == kls[1] > 1e-6


def test_a_kl_reference_of_another_rank_is_refused_with_both_numbers(base, tmp_path):
    kl = {"coefficient": 0.1, "reference": {"path": str(away(base, tmp_path / "reference", rank=4))}}
    with pytest.raises(WeightsMismatch, match=r"kl\.reference .* has rank 4 and alpha 16; the agent's adapter has 8"):
        learner_of(base, kl=kl).begin()


def test_kl_by_trajectory_is_what_the_engine_said_over_the_reference_summed_over_its_segments(base):
    parts = paired(segments(2))
    learner = learner_of(base, kl={"coefficient": 0.1, "addedTo": "reward"})
    learner.begin()  # the zero adapter is version 0: the policy is its own reference
    logprobs = [base.logprobs(None, collate([chain(part)]), TEMPERATURE).tolist() for part in parts]
    gaps = [float(part.behaviour[part.generated].sum()) - sum(mine) for part, mine in zip(parts, logprobs, strict=True)]
    expected = [gaps[at] + gaps[at + 1] for at in range(0, len(gaps), 2)]
    full, rest = pack([], pack_prefix_tree(parts, 384, 36), 36)
    found = sum(learner.kl_by_trajectory(batch, 3) for batch in [*full, rest])
    assert len(full) > 0
    assert list(found) == pytest.approx(expected, rel=1e-4)  # type: ignore[call-overload]
    metrics = step(learner, parts)
    assert metrics["kl"] == pytest.approx(sum(gaps) / metrics["tokens"], rel=1e-4)


def test_a_state_that_is_damaged_or_of_another_adapter_is_refused(base):
    with pytest.raises(StateInvalid, match="cannot be read"):
        read_state(b"nonsense")
    with pytest.raises(StateInvalid, match="cannot be read"):
        read_state(write_state(TrainingState())[:-3])
    learner = learner_of(base)
    name = tensor_name("model.layers.0.self_attn.q_proj", "A")
    with pytest.raises(StateInvalid, match="lacks the moments of"):
        learner.restore({}, TrainingState(num_updates=1, first_moments={name: torch.zeros(8, 64)}))

"""Steps against a slow loop over plain transformers and peft, a learner's state out and in, rates, and gradients that are not finite."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rl.papers import CAP, FORMS
from tests.tables import rows
from tests.trainer.harness import VOCABULARY, assignment_of, job

from marlaas_api.messages.training_settings import OptimizerSettings
from marlaas_worker.adapters import AdapterConfig, tensor_name, write_adapter
from marlaas_worker.trainer.batching import Segment, pack, pack_prefix_tree
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.lora import WeightsMismatch
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.optimizer import StateInvalid, TrainingState, learning_rate, read_state, write_state

TEMPERATURE = 0.8


def owner_of(part, parts):
    """The reply that a segment belongs to: its own unless it names a trajectory."""
    return part.trajectory if part.trajectory_tokens is not None else parts.index(part)


def slow_step(folder, weights, minibatches, settings):
    """Token by token, segment by segment, without padding; the loss as its paper writes it, an update for each minibatch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=layers, lora_dropout=0.0)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    named = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(weights[name])
    epsilon = settings.get("epsilon", 1e-8)
    optimizer = torch.optim.AdamW(named.values(), lr=settings["rate"], eps=epsilon, weight_decay=0.0)
    proximal, norms, heat = {}, [], 1.0 if settings["algorithm"] == "sft" else TEMPERATURE
    with torch.no_grad():
        for part in (part for parts in minibatches for part in parts):
            logits = model(input_ids=torch.tensor([part.ids.tolist()])).logits[0] / heat
            places = np.flatnonzero(part.generated).tolist()
            proximal[id(part)] = [float(logits[at - 1].log_softmax(-1)[int(part.ids[at])]) for at in places]
    for parts in minibatches * settings.get("epochs", 1):
        optimizer.zero_grad()
        slow_loss(model, parts, proximal, {**settings, "heat": heat}).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), settings["max_norm"])))
        optimizer.step()
    settings["moments"] = {name: optimizer.state[value]["exp_avg"] for name, value in named.items()}
    return {name: value.detach().clone() for name, value in named.items()}, sum(norms) / len(norms)


def slow_loss(model, parts, proximal, settings):
    replies: dict[int, Any] = {}
    penalty, bonus, num_replies = torch.zeros(()), torch.zeros(()), len({owner_of(part, parts) for part in parts})
    for part in parts:
        logits = model(input_ids=torch.tensor([part.ids.tolist()])).logits[0] / settings["heat"]
        with torch.no_grad(), model.disable_adapter():
            reference = (model(input_ids=torch.tensor([part.ids.tolist()])).logits[0] / TEMPERATURE).log_softmax(-1)
        places = np.flatnonzero(part.generated).tolist()
        pi = [logits[place - 1].log_softmax(-1)[int(part.ids[place])] for place in places]
        mu = [float(part.behaviour[place]) for place in places]
        reply = replies.setdefault(owner_of(part, parts), ([], [], [], part.advantage))
        for values, more in zip(reply, (pi, mu, proximal[id(part)]), strict=False):
            values.extend(more)
        for place, p, m, x in zip(places, pi, mu, proximal[id(part)], strict=True):
            gap = p.detach() - reference[place - 1, int(part.ids[place])]
            weight = (p.detach() - m).exp()
            if settings["ratio"] == "proximal":
                weight = min(np.exp(x - m), CAP) * (p.detach() - x).exp()
            penalty = penalty + weight * gap * p / (part.num_trajectory_tokens * num_replies)
            spread = logits[place - 1].log_softmax(-1)
            bonus = bonus - (spread.exp() * spread).sum() / (part.num_trajectory_tokens * num_replies)
    batch = list(replies.values())
    objective = FORMS[settings["ratio"]][settings["algorithm"]](batch) + settings["entropy"] * bonus
    return settings["kl"] * penalty - objective


def segments(seed, count=6):
    """Segments with one of two prompts each, whose behaviour policy is some way off the model's."""
    draw = np.random.default_rng(seed)
    prompts, made = draw.integers(0, VOCABULARY, (2, 8)), []
    for number in range(count):
        ids = np.concatenate([prompts[number % 2], draw.integers(0, VOCABULARY, draw.integers(1, 12))]).astype(np.int32)
        generated = np.arange(len(ids)) >= draw.integers(1, 9)
        behaviour = np.where(generated, -4.0 * draw.random(len(ids)) - 1.0, 0.0).astype(np.float32)
        made.append(Segment(ids, generated, behaviour, 0, float(draw.normal())))
    return made


def paired(parts):
    """The same segments, two to a trajectory; the first one's advantage is the trajectory's."""
    tokens = [sum(int(part.generated.sum()) for part in parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return [
        replace(part, trajectory=at // 2, trajectory_tokens=tokens[at // 2], advantage=parts[at - at % 2].advantage)
        for at, part in enumerate(parts)
    ]


def learner_of(base, **training: Any):
    return Learner(base, assignment_of(job(**training)))


def step(learner, parts, version=0, budget=64, pairs_per_token=384, num_groups=1):
    full, rest = pack([], pack_prefix_tree(parts, pairs_per_token, budget), budget)
    for batch in [*full, rest]:
        learner.accumulate(batch)
    return learner.step(version, num_groups)


@pytest.mark.parametrize(("algorithm", "ratio", "terms", "parts"), rows(__file__, "slow_steps"))
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
    expected, norm = slow_step(tiny_model, before, [made], settings)
    assert (metrics.get("kl", 0.0) > 0) == (kl > 0)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in fresh.weights().items():
        found = fresh.state(0, ()).first_moments[name]
        assert torch.allclose(found, settings["moments"][name], rtol=0, atol=1e-7), "a tenth of the gradient"
        moved = (value - before[name]).abs().max()
        assert moved > 1e-4
        assert torch.allclose(value, expected[name], atol=2e-5), name


@pytest.mark.parametrize(("algorithm", "ratio", "epochs", "kl"), rows(__file__, "several_updates"))
def test_a_step_of_four_updates_is_the_one_that_a_slow_loop_takes(base, tiny_model, algorithm, ratio, epochs, kl):
    job = {"algorithm": algorithm, "ratio": ratio, "correction": {} if ratio == "proximal" else {"type": "none"}}
    job |= {"maxStaleness": 1, "groupsPerStep": 4, "updatesPerStep": 4 // epochs, "epochs": epochs}
    job |= {"kl": {"coefficient": kl}}
    rate, epsilon = 1e-2, 1e-3  # far enough that clips bind; and no rounded zero becomes a whole update
    learner = learner_of(base, **job, optimizer={"learningRate": rate, "epsilon": epsilon, "maxGradNorm": 0.5})
    learner.begin()
    step(learner, segments(0))
    before, made = learner.weights(), [segments(seed, count=4) for seed in range(1, 1 + 4 // epochs)]
    learner.restore(before, TrainingState())
    batches = [pack_prefix_tree(parts, 384, 64) for parts in made]
    proximal = []
    for number, rows_of in enumerate(batches * epochs):
        if number:
            learner.update(0, 1)
        proximal.append(learner.accumulate(rows_of, proximal[number % len(made)] if number >= len(made) else None))
    metrics = learner.step(0, 1)
    settings = {"algorithm": algorithm, "ratio": ratio, "kl": kl, "entropy": 0.0, "rate": rate, "max_norm": 0.5}
    expected, norm = slow_step(tiny_model, before, made, settings | {"epochs": epochs, "epsilon": epsilon})
    assert (metrics["updates"], metrics["grad_norm"]) == (4, pytest.approx(norm, rel=1e-5))
    assert metrics.get("clip_fraction", 0.0) > 0 or algorithm in ("rloo", "cispo", "sft")
    assert metrics["tokens"] == sum(int(part.generated.sum()) for parts in made for part in parts)
    whole, first, reached = (
        torch.cat([one[name].flatten() for name in before]) for one in (expected, before, learner.weights())
    )
    assert (whole - first).norm() > 0.1 * whole.norm()
    assert (reached - whole).norm() <= 1e-6 * whole.norm()


@pytest.mark.parametrize(("flat_groups", "num_groups", "factor"), rows(__file__, "flat_groups"))
def test_counted_flat_groups_scale_a_steps_gradient_by_the_share_of_groups_that_train(
    base, flat_groups, num_groups, factor
):
    def taken(flat, num):
        learner = learner_of(base, flatGroups=flat, groupsPerStep=4, optimizer={"maxGradNorm": 1e9})
        learner.begin()
        step(learner, segments(0), num_groups=4)  # all groups train
        first = learner.state(0, ()).first_moments
        metrics = step(learner, segments(1), 1, num_groups=num)
        last = learner.state(1, ()).first_moments
        return metrics, {name: (last[name] - 0.9 * first[name]) / 0.1 for name in last}  # the step's gradient

    (metrics, gradient), (whole, expected) = taken(flat_groups, num_groups), taken("excluded", 4)
    assert metrics["grad_norm"] == pytest.approx(factor * whole["grad_norm"], rel=1e-6)
    assert metrics["loss"] == pytest.approx(factor * whole["loss"], rel=1e-6)
    for name, value in gradient.items():
        assert torch.allclose(value, factor * expected[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(("algorithm", "ratio", "correction"), rows(__file__, "corrections"))
def test_a_step_in_microbatches_is_the_step_of_the_whole_batch(base, algorithm, ratio, correction):
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


def test_an_agents_own_settings_train_as_those_of_a_job_with_the_same(base):
    """Two steps with the agent's rate, clip of the gradient and entropy give the bits of a job that has them for all."""
    own = {"optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}, "entropy": {"coefficient": 0.2}}
    rate, weights = {"training": {"optimizer": {"learningRate": 1e-3}}}, []
    for document in (job(agent={"training": own}), job(**own), job(), job(agent=rate)):
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


def away(base, folder, rank=8, named=""):
    attached = base.attach(rank, 16, ())
    draw = torch.Generator().manual_seed(4)
    start = {name: 0.05 * torch.randn(value.shape, generator=draw) for name, value in attached.parameters.items()}
    folder.mkdir()
    for name, data in write_adapter(start, AdapterConfig(rank, 16, named)).items():
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


def test_after_supervised_fine_tuning_its_result_is_the_kl_reference_and_the_moments_are_new(base):
    sft = {"data": {}, "steps": 1, "learningRate": 1e-2}
    assignment = assignment_of(job(agent={"initFrom": {"sft": sft}}, kl={"coefficient": 0.1}))
    learner, found = Learner(base, assignment), []
    learner.begin()
    for number in range(3):
        learner.use(assignment.training_at(number))
        found.append(step(learner, segments(number), number))
        assert learner.state(number, ()).num_updates == number
    assert found[0]["perplexity"] == pytest.approx(math.exp(found[0]["loss"]))
    assert ("ess" in found[0], found[0]["learning_rate"], found[1]["learning_rate"]) == (False, 1e-2, 3e-3)
    assert found[1]["kl"] < 1e-9 < 1e-6 < found[2]["kl"]


def test_loss_and_token_accuracy_are_those_of_the_base_model_and_held_out_demonstrations_train_nothing(base, sampler):
    def expected(parts):
        rows = [(part, sampler.logprobs(part.ids.tolist())) for part in parts]
        found = [(row[at - 1], part.ids[at]) for part, row in rows for at in np.flatnonzero(part.generated)]
        loss = -sum(float(logprobs[token]) for logprobs, token in found) / len(found)
        return loss, sum(int(logprobs.argmax()) == token for logprobs, token in found) / len(found)

    sampler.merge({}, 1.0)
    parts, held_out = [replace(part, advantage=1.0) for part in segments(0)], segments(5)
    for part in (*parts[::2], held_out[0]):
        part.ids[-1] = sampler.logprobs(part.ids.tolist())[-2].argmax()
    learner, alone = learner_of(base, algorithm="sft"), learner_of(base, algorithm="sft")
    assert not [*learner.begin(), *alone.begin()]
    assert learner.try_measure_held_out([*pack_prefix_tree(held_out, 384, 64)])
    metrics, without = step(learner, parts), step(alone, parts)
    assert [metrics["loss"], metrics["token_accuracy"]] == pytest.approx(expected(parts), abs=1e-5)
    found = [metrics[f"held_out_{name}"] for name in ("loss", "token_accuracy")]
    assert (found == pytest.approx(expected(held_out), abs=1e-5), without.items() < metrics.items()) == (True, True)
    assert all(torch.equal(value, alone.weights()[name]) for name, value in learner.weights().items())


def test_a_kl_reference_of_another_rank_and_a_damaged_state_are_refused(base, tmp_path):
    kl = {"coefficient": 0.1, "reference": {"path": str(away(base, tmp_path / "reference", rank=4))}}
    with pytest.raises(WeightsMismatch, match=r"kl\.reference .* has rank 4 and alpha 16; the agent's adapter has 8"):
        learner_of(base, kl=kl).begin()
    with pytest.raises(StateInvalid, match="cannot be read"):
        read_state(b"nonsense")
    with pytest.raises(StateInvalid, match="cannot be read"):
        read_state(write_state(TrainingState())[:-3])
    learner = learner_of(base)
    name = tensor_name("model.layers.0.self_attn.q_proj", "A")
    with pytest.raises(StateInvalid, match="lacks the moments of"):
        learner.restore({}, TrainingState(num_updates=1, first_moments={name: torch.zeros(8, 64)}))


@pytest.mark.parametrize(("spec", "num_steps", "rates"), rows(__file__, "schedules"))
def test_a_step_has_the_rate_of_its_schedule(spec, num_steps, rates):
    optimizer = OptimizerSettings.model_validate({"learning_rate": 1.0, **spec})
    assert [learning_rate(optimizer, number, num_steps) for number in range(num_steps)] == pytest.approx(rates)


def test_a_step_has_the_rate_that_its_metrics_record_and_epsilon_is_added_to_the_root_of_the_second_moment(base):
    """AdamW's first step is rate g / (|g| + epsilon): its bias-corrected moments are g and g^2. The gradient's norm is clipped to 1."""
    learner = learner_of(base, steps=4, optimizer={"learningRate": 1e-2, "schedule": "linear", "epsilon": 0.5})
    learner.begin()
    before = learner.weights()
    assert step(learner, segments(0), 3)["learning_rate"] == pytest.approx(2.5e-3)
    moments, after = learner.state(3, ()).first_moments, learner.weights()
    for name, moment in moments.items():
        gradient = 10 * moment  # beta1 is 0.9
        expected = 2.5e-3 * gradient / (gradient.abs() + 0.5)
        assert torch.allclose(before[name] - after[name], expected, rtol=1e-3, atol=1e-7)


def everything(learner):
    """Weights, moments and counts of updates; not the counts of skipped steps."""
    state = learner.state(0, ())
    kept = TrainingState(
        num_updates=state.num_updates, first_moments=state.first_moments, second_moments=state.second_moments
    )
    return write_state(kept) + b"".join(value.numpy().tobytes() for value in learner.weights().values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_leaves_no_trace(base, value):
    disturbed, straight = learner_of(base), learner_of(base)
    for learner in (disturbed, straight):
        learner.begin()
        step(learner, segments(1), 0)
    before = everything(disturbed)
    broken = [Segment(part.ids, part.generated, part.behaviour, 0, value) for part in segments(0)]
    metrics = step(disturbed, broken, 1)
    assert metrics["skipped_update"] == 1.0
    assert "grad_norm" not in metrics
    assert all(math.isfinite(each) for each in metrics.values())
    assert everything(disturbed) == before
    assert [step(learner, segments(2), 2)["skipped_update"] for learner in (disturbed, straight)] == [0.0, 0.0]
    assert everything(disturbed) == everything(straight)


def test_a_state_of_an_earlier_release_counts_nothing_and_lowers_nothing(base):
    data = write_state(TrainingState(step=4, token_budget=32, num_skipped=2))
    written = b'"num_updates": 0, "token_budget": 32, "num_skipped": 2'
    assert written in data
    earlier = read_state(data.replace(written, b'"num_updates": 0' + b" " * (len(written) - 16)))
    assert (earlier.step, earlier.token_budget, earlier.num_skipped) == (4, 0, 0)
    learner = learner_of(base)
    learner.restore({}, earlier)
    assert learner.token_budget == 64

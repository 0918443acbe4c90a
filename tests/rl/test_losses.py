"""Sums over micro-batches, metrics, what masks leave out, what far-apart policies do, and the estimators of the KL by hand."""

import itertools
import math
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.rl import papers
from tests.rl.papers import NONE, config_of, f64, lengths_of, moved, normalised, part_of, random_record, record_of
from tests.tables import rows

from marlaas_worker.rl.algorithms import Algorithm, Ratio
from marlaas_worker.rl.corrections import Bounds, counted
from marlaas_worker.rl.kl import KlEstimator, kl_estimate, kl_penalty
from marlaas_worker.rl.losses import LossSums, TokenRecord, kept, policy_loss

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
MOST = {"truncated": 1.3, "masked-token": 1.5, "masked-sequence": 2.0, "icepop": 2.0}
CORRECTIONS = [NONE, *(Bounds(kind, cap) for kind, cap in MOST.items())]
LOG2 = math.log(2.0)


@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    algorithm=st.sampled_from(NAMES),
    correction=st.sampled_from(CORRECTIONS),
    ratio=st.sampled_from(["behaviour", "proximal"]),
)
def test_dealt_out_to_microbatches_loss_gradient_and_metrics_are_those_of_the_whole(cuts, algorithm, correction, ratio):
    """Segments of one trajectory may be in different micro-batches."""
    config = config_of(algorithm, correction, kl_coefficient=0.1, ratio=ratio)
    whole = random_record(12, seed=1, reference=True)
    owners = whole.sequences // 3
    whole = replace(whole, lengths=lengths_of(owners))
    pieces, sums = torch.zeros_like(whole.trainer), LossSums()
    for begin, end in itertools.pairwise([0, *sorted(cuts), 12]):
        piece = part_of(whole, (whole.sequences >= begin) & (whole.sequences < end))
        loss, part_sums = policy_loss(piece, config)
        pieces += torch.autograd.grad(loss, whole.trainer)[0]
        sums += part_sums
    expected_loss, gradient = normalised(whole, config)
    _, expected = policy_loss(whole, config)
    assert torch.allclose(pieces / sums.denominator, gradient, rtol=1e-12, atol=1e-15)
    assert sums.metrics() == pytest.approx(expected.metrics(), rel=1e-9)
    assert sums.metrics()["loss"] == pytest.approx(expected_loss)


def test_the_metrics_are_the_ones_computed_by_hand():
    record = record_of([(1.0, [1.0, 2.0, 4.0]), (-1.0, [0.5])], [0.0, LOG2, 0.0, 0.0])
    metrics = policy_loss(record, config_of("dapo"))[1].metrics()
    assert (metrics["tokens"], metrics["sequences"], metrics["masked_fraction"]) == (4, 2, 0)
    assert metrics["ratio_mean"] == pytest.approx((1 + 2 + 4 + 0.5) / 4)
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["clip_fraction"] == pytest.approx(3 / 4)
    assert metrics["logprob_gap"] == pytest.approx(4 * LOG2 / 4)
    assert metrics["entropy"] == pytest.approx(-record.trainer.mean().item())
    assert metrics["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 16 + 0.25)))
    assert metrics["kl"] == pytest.approx((2.0 - LOG2 - 1.0) / 4)
    assert metrics["behaviour_kl"] == pytest.approx(((2 - LOG2 - 1) + (4 - math.log(4) - 1) + (0.5 + LOG2 - 1)) / 4)
    assert metrics["loss"] == pytest.approx(-(1 + 1.28 + 1.28 - 0.8) / 4)
    truncated = policy_loss(record, config_of("rloo", Bounds("truncated", 3.0)))[1].metrics()
    assert truncated["truncated_fraction"] == pytest.approx(1 / 4)
    assert truncated["loss"] == pytest.approx(-(1 + 2 + 3 - 0.5) / 2)


def test_metrics_of_ratios_are_of_what_the_form_compares_with_the_sampler_and_the_others_of_what_it_does():
    record = moved(record_of([(1.0, [1.0, 2.0, 4.0]), (-1.0, [0.5])]), [1.0, 2.0, 3.5, 1.0])
    configs = {ratio: config_of("grpo", Bounds("truncated", 3.0), ratio=ratio) for ratio in get_args(Ratio)}
    found = {ratio: policy_loss(record, config)[1].metrics() for ratio, config in configs.items()}
    assert [found[form]["ratio_max"] for form in ("proximal", "behaviour")] == pytest.approx([3.5, 4.0])
    gaps = {"proximal": [1.0, 2.0, 3.5, 1.0], "behaviour": [1.0, 2.0, 4.0, 0.5]}
    for form, ratios in gaps.items():
        gap = sum(abs(math.log(ratio)) for ratio in ratios) / 4
        assert found[form]["logprob_gap"] == pytest.approx(gap)
    assert found["behaviour"]["clip_fraction"] == pytest.approx(3 / 4)  # r: 2, 4 and 0.5
    assert found["proximal"]["clip_fraction"] == pytest.approx(1 / 4)  # rho: 1, 1, 1.14 and 0.5
    assert found["behaviour"]["truncated_fraction"] == pytest.approx(1 / 4)  # r: 4
    assert found["proximal"]["truncated_fraction"] == pytest.approx(1 / 4)  # c: 3.5


def test_the_entropy_bonus_is_the_one_computed_by_hand_and_weighs_tokens_as_the_loss_does():
    record = record_of([(1.0, [3.0]), (1.0, [1.0, 1.0])])
    entropies = torch.tensor([2.0, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    bonus = replace(record, entropies=entropies)
    for algorithm, weights in (("grpo", [1 / 2, 1 / 4, 1 / 4]), ("dapo", [1 / 3] * 3), ("rloo", [1 / 2] * 3)):
        config = config_of(algorithm, entropy_coefficient=0.1)  # type: ignore[arg-type]
        loss, sums = policy_loss(bonus, config)
        plain, _ = policy_loss(record, config)
        gained = 0.1 * sum(weight * value for weight, value in zip(weights, [2.0, 0.5, 1.5], strict=True))
        assert (loss - plain).item() / sums.denominator == pytest.approx(-gained)
        (slopes,) = torch.autograd.grad(loss, entropies)
        assert (slopes / sums.denominator).tolist() == pytest.approx([-0.1 * weight for weight in weights])
        assert sums.metrics()["entropy"] == pytest.approx(4.0 / 3)
    masked = config_of("dapo", Bounds("masked-token", 2.0), entropy_coefficient=0.1)
    (slopes,) = torch.autograd.grad(policy_loss(bonus, masked)[0], entropies)
    assert slopes.tolist() == pytest.approx([0.0, -0.1, -0.1]), "the first token is masked"


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_microbatch_without_tokens_is_zero_and_no_error(algorithm):
    empty = TokenRecord(*(torch.zeros(0) for _ in range(3)), *(torch.zeros(0, dtype=torch.int64) for _ in "ab"))
    loss, sums = policy_loss(empty, config_of(algorithm))
    assert loss.item() == 0.0
    assert sums == LossSums()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda bounds: str(bounds.type))
@pytest.mark.parametrize("algorithm", NAMES)
def test_policies_absurdly_far_apart_give_finite_gradients(algorithm, correction):
    behaviour = torch.tensor([-200.0, -1e-3, -200.0, -1e-3])
    trainer = torch.tensor([-1e-3, -200.0, -1e-3, -200.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    for sequences in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 1])):
        record = TokenRecord(trainer, behaviour, advantages, sequences, lengths_of(sequences), behaviour)
        for ratio in ("behaviour", "proximal"):
            loss, sums = policy_loss(record, config_of(algorithm, correction, kl_coefficient=0.1, ratio=ratio))
            assert torch.isfinite(torch.autograd.grad(loss, trainer)[0]).all()
            assert all(math.isfinite(value) for value in sums.metrics().values())


MASKS = [Bounds("masked-token", 1.3), Bounds("masked-sequence", 1.3), Bounds("icepop", 1.4, 0.7)]


@pytest.mark.parametrize(("bounds", "kept"), rows(__file__, "masks"))
def test_what_counts_is_what_was_worked_out_by_hand(bounds, kept):
    ratios, sequences = f64([0.25, 4.0, 2.5, 2.0, 1.5]), torch.tensor([0, 0, 0, 1, 1])
    bounds = Bounds(*bounds)
    nudged = Bounds(bounds.type, bounds.cap + 1e-9, bounds.floor - 1e-9)
    found = counted(ratios.log(), sequences, nudged)
    assert (found if found is None else found.tolist()) == kept


def test_masks_look_at_what_happened_before_the_step_and_not_at_its_own_move():
    record = moved(record_of([(1.0, [4.0, 4.0])]), [4.0, 1.0])  # staleness moved the first, the step itself the second
    loss, gradient = normalised(record, config_of("rloo", Bounds("masked-token", 3.0), ratio="proximal"))
    assert gradient.tolist() == pytest.approx([0.0, -4.0 / 0.5])  # half of the trajectory is left
    assert loss == pytest.approx(-4.0 / 0.5)


@pytest.mark.parametrize(("bounds", "whole", "value"), rows(__file__, "segments"))
def test_gspo_masks_whole_segments_by_their_geometric_mean(bounds, whole, value):
    """Advantages 1, -1, 2, of 2, 2 and 1 tokens; the means of c are 1, 6 and 1/4. By hand: the mean over the kept of -c A."""
    record = record_of([(1.0, [4.0, 0.25]), (-1.0, [9.0, 4.0]), (2.0, [0.25])])
    loss, gradient = normalised(record, config_of("gspo", Bounds(*bounds), ratio="proximal"))
    assert (loss, [bool(slope) for slope in gradient]) == (pytest.approx(value), whole)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("bounds", MASKS, ids=lambda bounds: str(bounds.type))
@pytest.mark.parametrize("algorithm", NAMES)
def test_a_masked_token_leaves_the_loss_and_every_denominator(algorithm, bounds, ratio):
    record = random_record(seed=2, reference=True)
    config = config_of(algorithm, bounds, kl_coefficient=0.1, ratio=ratio)
    keep = kept(replace(record, trainer=record.trainer.detach()), config)
    assert 0 < keep.sum() < len(keep)
    never = config_of(algorithm, Bounds("truncated", 1e9), kl_coefficient=0.1, ratio=ratio)
    loss, gradient = normalised(record, config)
    expected, sums = policy_loss(record.where(keep), never)  # of a record that never held the others
    (slopes,) = torch.autograd.grad(expected, record.trainer)
    assert loss == pytest.approx(expected.item() / sums.denominator)
    assert torch.allclose(gradient, slopes / sums.denominator, rtol=1e-12, atol=0)
    assert not gradient[~keep].any()
    metrics = policy_loss(record, config)[1].metrics()
    assert metrics["masked_fraction"] == pytest.approx((~keep).double().mean().item())
    assert metrics["tokens"] == len(keep)
    assert metrics["sequences"] == pytest.approx((1 / record.lengths[keep]).sum().item(), abs=1e-5)


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_mask_that_takes_everything_leaves_a_zero_and_no_error(algorithm):
    record = record_of([(1.0, [9.0, 9.0])])
    loss, sums = policy_loss(record, config_of(algorithm, Bounds("masked-token", 2.0)))
    assert (loss.item(), sums.denominator, sums.num_counted, sums.num_tokens) == (0.0, 0, 0, 2)
    assert all(math.isfinite(value) for value in sums.metrics().values())


@pytest.mark.parametrize("bounds", [*MASKS, Bounds("truncated", 2.0)], ids=lambda bounds: str(bounds.type))
def test_a_logprob_that_is_no_number_is_never_masked_away(bounds):
    record = record_of([(1.0, [1.0, 1.0])])
    broken = torch.tensor([math.nan, -1.0], dtype=torch.float64, requires_grad=True)
    one = replace(record, trainer=broken)
    for ratio in ("behaviour", "proximal"):
        assert math.isnan(policy_loss(one, config_of("grpo", bounds, ratio=ratio))[0].item())


ALL: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize(
    ("estimator", "algorithm", "form", "bounds", "ratio", "value", "slope"), rows(__file__, "kl_by_hand")
)
def test_value_slope_and_weight_are_the_ones_computed_by_hand(estimator, algorithm, form, bounds, ratio, value, slope):
    record = moved(record_of([(0.0, [ratio])], [LOG2]), [ratio / 2])
    config = config_of(algorithm, Bounds(*bounds), kl_coefficient=0.5, kl_estimator=estimator, ratio=form)
    loss, gradient = normalised(record, config)
    assert loss == pytest.approx(0.5 * papers.arithmetic(value))
    assert gradient.item() == pytest.approx(0.5 * papers.arithmetic(slope))


def drawn(seed):
    """Logits of a policy, and the logprobs of that policy, a reference and a behaviour policy."""
    draw = torch.Generator().manual_seed(seed)
    logits, *others = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), *(torch.log_softmax(values, 0) for values in (logits, *others))


@pytest.mark.parametrize("estimator", ALL)
def test_the_gradient_is_that_of_the_exact_reverse_kl_in_expectation(estimator):
    logits, policy, reference, behaviour = drawn(5)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    per_token = kl_penalty(estimator, policy, reference, (policy - behaviour).exp().detach())  # each token once,
    estimate = torch.autograd.grad((behaviour.exp() * per_token).sum(), logits)[0]  # sampled from the behaviour policy
    assert torch.allclose(estimate, exact, rtol=1e-12, atol=1e-14)


def test_kl_in_the_reward_has_the_gradient_of_the_exact_reverse_kl_in_expectation():
    logits, policy, reference, _ = drawn(9)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    behaviour = policy.detach()  # the policy that sampled
    per_reply = -(behaviour - reference) * policy  # reward times log pi, each reply once
    estimate = torch.autograd.grad((behaviour.exp() * per_reply).sum(), logits)[0]
    assert torch.allclose(estimate, -exact, rtol=1e-12, atol=1e-14)


@given(gap=st.floats(-10, 10))
@example(gap=7.0e-17)  # the logprobs differ by less than rounding: k3 is -1.1e-16
def test_k2_and_k3_are_up_to_rounding_never_negative_and_zero_only_for_equal_policies(gap):
    for estimator in ("k2", "k3"):
        estimate = kl_estimate(estimator, f64([-1.0]), f64([-1.0 + gap])).item()  # type: ignore[arg-type]
        assert estimate >= -4 * sys.float_info.epsilon
        assert estimate > 0.0 or abs(gap) < 1e-6

"""What does not count is as if it had never been sampled; what is truncated weighs no more than the cap."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.rl.records import config_of, f64, moved, normalised, random_record, record_of

from marlaas_worker.rl.algorithms import Algorithm, Correction
from marlaas_worker.rl.corrections import CAPS, Bounds, counted, means_of, weights_of
from marlaas_worker.rl.losses import LossConfig, TokenRecord, policy_loss

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
MASKS = [Bounds("masked-token", 1.3), Bounds("masked-sequence", 1.3), Bounds("icepop", 1.4, 0.7)]


def of_those_left(record: TokenRecord, keep: torch.Tensor, config: LossConfig) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a record that never held the others."""
    loss, sums = policy_loss(record.where(keep), config)
    (slopes,) = torch.autograd.grad(loss, record.trainer)
    return loss.item() / sums.denominator, slopes / sums.denominator


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        (Bounds("masked-token", 3.0), [True, False, True, True, True]),
        (Bounds("masked-sequence", 3.0), [True, True, True, True, True]),  # 0.25 * 4 * 2.5 = 2.5, and 3
        (Bounds("masked-sequence", 2.75), [True, True, True, False, False]),
        (Bounds("icepop", 5.0, 0.5), [False, True, True, True, True]),
        (Bounds("icepop", 2.5, 0.25), [True, False, True, True, True]),  # the bounds themselves count
        (Bounds("none"), None),  # without a mask everything counts
        (Bounds("truncated", 2.0), None),
    ],
)
def test_what_counts_is_what_was_worked_out_by_hand(bounds: Bounds, kept: list[bool] | None) -> None:
    ratios, sequences = f64([0.25, 4.0, 2.5, 2.0, 1.5]), torch.tensor([0, 0, 0, 1, 1])
    nudged = Bounds(bounds.type, bounds.cap + 1e-9, bounds.floor - 1e-9)
    found = counted(ratios.log(), sequences, nudged)
    assert (found if found is None else found.tolist()) == kept


@pytest.mark.parametrize("kind", ["masked-token", "masked-sequence", "icepop"])
def test_what_is_not_masked_weighs_what_the_sampler_disagrees_by(kind: Correction) -> None:
    logs = f64([0.25, 1.0, 4.0]).log()
    assert weights_of(logs, Bounds(kind, 5.0)).tolist() == pytest.approx([0.25, 1.0, 4.0])
    assert weights_of(logs, Bounds("truncated", 2.0)).tolist() == pytest.approx([0.25, 1.0, 2.0])
    assert weights_of(logs, Bounds("none")).tolist() == [1.0, 1.0, 1.0]


def test_masks_look_at_what_happened_before_the_step_and_not_at_its_own_move() -> None:
    record = moved(record_of([(1.0, [4.0, 4.0])]), [4.0, 1.0])  # staleness moved the first, the step itself the second
    loss, gradient = normalised(record, config_of("rloo", Bounds("masked-token", 3.0), ratio="proximal"))
    assert gradient.tolist() == pytest.approx([0.0, -4.0 / 0.5])  # half of the trajectory is left
    assert loss == pytest.approx(-4.0 / 0.5)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
@pytest.mark.parametrize("bounds", MASKS, ids=lambda bounds: str(bounds.type))
@pytest.mark.parametrize("algorithm", NAMES)
def test_a_masked_token_leaves_the_loss_and_every_denominator(algorithm, bounds, ratio) -> None:
    record = random_record(seed=2, reference=True)
    keep = counted((record.trainer - record.behaviour).detach(), record.sequences, bounds)
    assert keep is not None
    assert 0 < keep.sum() < len(keep)
    config = config_of(algorithm, bounds, kl_coefficient=0.1, ratio=ratio)
    never = config_of(algorithm, Bounds("truncated", 1e9), kl_coefficient=0.1, ratio=ratio)
    loss, gradient = normalised(record, config)
    expected, slopes = of_those_left(record, keep, never)
    assert loss == pytest.approx(expected)
    assert torch.allclose(gradient, slopes, rtol=1e-12, atol=0)
    assert not gradient[~keep].any()
    metrics = policy_loss(record, config)[1].metrics()
    assert metrics["masked_fraction"] == pytest.approx((~keep).double().mean().item())
    assert metrics["tokens"] == len(keep)
    assert metrics["sequences"] == pytest.approx((1 / record.lengths[keep]).sum().item(), abs=1e-5)


@pytest.mark.parametrize("algorithm", NAMES)
def test_a_mask_that_takes_everything_leaves_a_zero_and_no_error(algorithm: Algorithm) -> None:
    record = record_of([(1.0, [9.0, 9.0])])
    loss, sums = policy_loss(record, config_of(algorithm, Bounds("masked-token", 2.0)))
    assert (loss.item(), sums.denominator, sums.num_counted, sums.num_tokens) == (0.0, 0, 0, 2)
    assert all(math.isfinite(value) for value in sums.metrics().values())


@pytest.mark.parametrize("algorithm", NAMES)
def test_truncation_scales_down_exactly_the_weights_above_the_cap(algorithm: Algorithm) -> None:
    record = random_record(seed=4, spread=0.8)
    free = normalised(record, config_of(algorithm, clip_low=0.9, clip_high=9.0))[1]
    cut = normalised(record, config_of(algorithm, Bounds("truncated", 1.2), clip_low=0.9, clip_high=9.0))[1]
    logs = (record.trainer - record.behaviour).detach()
    if algorithm == "gspo":
        logs = means_of(logs, record.sequences)
    assert (logs.exp() > 1.2).any()
    assert torch.allclose(cut, free * (1.2 / logs.exp()).clamp(max=1.0), rtol=1e-9)


@pytest.mark.parametrize("bounds", [*MASKS, Bounds("truncated", 2.0)], ids=lambda bounds: str(bounds.type))
def test_a_logprob_that_is_no_number_is_never_masked_away(bounds: Bounds) -> None:
    record = record_of([(1.0, [1.0, 1.0])])
    broken = torch.tensor([math.nan, -1.0], dtype=torch.float64, requires_grad=True)
    one = replace(record, trainer=broken)
    for ratio in ("behaviour", "proximal"):
        assert math.isnan(policy_loss(one, config_of("grpo", bounds, ratio=ratio))[0].item())


def test_every_correction_that_needs_a_cap_has_one() -> None:
    assert set(CAPS) == set(get_args(Correction)) - {"none"}

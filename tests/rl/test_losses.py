"""The loss against numbers from paper and pencil, finite differences, and a formula written token by token in plain Python."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from marlaas_worker.rl.losses import (
    LossConfig,
    LossSums,
    TokenRecord,
    decoupled_terms,
    k3_estimate,
    policy_loss,
    reverse_kl,
)

PPO = LossConfig(correction="none")
TRUNCATED = LossConfig(correction="truncated", cap=2.0)
LOG2 = math.log(2.0)


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def record_of(
    log_ratios: list[float], advantages: list[float], reference_gaps: list[float] | None = None
) -> TokenRecord:
    behaviour = torch.linspace(-3.0, -0.5, len(log_ratios), dtype=torch.float64)
    trainer = (behaviour + f64(log_ratios)).requires_grad_()
    reference = None if reference_gaps is None else (trainer + f64(reference_gaps)).detach()
    return TokenRecord(trainer, behaviour, f64(advantages), reference)


def random_record(num_tokens: int, seed: int = 0, reference: bool = False) -> TokenRecord:
    draw = torch.Generator().manual_seed(seed)
    behaviour = -3.0 * torch.rand(num_tokens, generator=draw, dtype=torch.float64)
    trainer = (behaviour + 0.5 * torch.randn(num_tokens, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(num_tokens, generator=draw, dtype=torch.float64)
    gaps = 0.7 * torch.randn(num_tokens, generator=draw, dtype=torch.float64)
    return TokenRecord(trainer, behaviour, advantages, (trainer + gaps).detach() if reference else None)


def gradient(record: TokenRecord, config: LossConfig) -> Tensor:
    return torch.autograd.grad(policy_loss(record, config)[0], record.trainer)[0]


# by hand ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
        (1.2, 1.0, -1.2, -1.2),  # inside the bounds
        (1.5, 1.0, -1.28, 0.0),  # above 1 + high, and better than expected: held
        (0.5, 1.0, -0.5, -0.5),  # below, but the advantage pulls it back: free
        (0.5, -1.0, 0.8, 0.0),  # below 1 - low, and worse than expected: held
        (1.5, -1.0, 1.5, 1.5),  # above, but the advantage pushes it down: free
    ],
)
def test_without_correction_the_loss_is_ppo_with_an_asymmetric_clip(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    record = record_of([math.log(ratio)], [advantage])
    assert policy_loss(record, PPO)[0].item() == pytest.approx(loss)
    assert gradient(record, PPO).item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 1.0, -1.5, -1.5),  # beyond the clip, which never binds: weighted, not held
        (0.5, -1.0, 0.5, 0.5),
        (4.0, 1.0, -2.0, -2.0),  # the weight stops at the cap
        (4.0, -1.0, 2.0, 2.0),
    ],
)
def test_the_truncated_correction_weighs_the_policy_gradient_up_to_the_cap(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    record = record_of([math.log(ratio)], [advantage])
    assert policy_loss(record, TRUNCATED)[0].item() == pytest.approx(loss)
    assert gradient(record, TRUNCATED).item() == pytest.approx(slope)


def test_a_third_proximal_policy_is_weighed_by_the_one_and_clipped_against_the_other() -> None:
    record = record_of(
        [math.log(3.0)], [1.0]
    )  # pi / mu = 3 = 1.2 (pi / prox, inside the clip) * 2.5 (prox / mu, cut to 2)
    proximal = (record.trainer - math.log(1.2)).detach()
    terms = decoupled_terms(record, proximal, TRUNCATED)
    assert (terms.weight * terms.surrogate).item() == pytest.approx(2.0 * 1.2)
    assert terms.truncated.item()
    assert not terms.clipped.item()


def test_the_reverse_kl_and_its_gradient_are_the_ones_computed_by_hand() -> None:
    config = LossConfig(correction="none", kl_coefficient=0.5)
    record = record_of([0.0], [0.0], [LOG2])  # the reference finds the token twice as likely
    assert policy_loss(record, config)[0].item() == pytest.approx(0.5 * (2.0 - LOG2 - 1.0))
    assert gradient(record, config).item() == pytest.approx(0.5 * -LOG2)


def test_the_metrics_are_the_ones_computed_by_hand() -> None:
    record = record_of([0.0, LOG2, math.log(4.0), -LOG2], [1.0, 1.0, 1.0, -1.0], [0.0, LOG2, 0.0, 0.0])
    metrics = policy_loss(record, PPO)[1].metrics()
    assert metrics["tokens"] == 4
    assert metrics["ratio_mean"] == pytest.approx((1 + 2 + 4 + 0.5) / 4)
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["clip_fraction"] == pytest.approx(3 / 4)
    assert metrics["logprob_gap"] == pytest.approx(4 * LOG2 / 4)
    assert metrics["entropy"] == pytest.approx(-record.trainer.mean().item())
    assert metrics["ess"] == pytest.approx(7.5**2 / (4 * (1 + 4 + 16 + 0.25)))
    assert metrics["kl"] == pytest.approx((2.0 - LOG2 - 1.0) / 4)
    assert metrics["behaviour_kl"] == pytest.approx(((2 - LOG2 - 1) + (4 - math.log(4) - 1) + (0.5 + LOG2 - 1)) / 4)
    assert metrics["loss"] == pytest.approx(-(1 + 1.28 + 1.28 - 0.8) / 4)
    assert policy_loss(record, TRUNCATED)[1].metrics()["truncated_fraction"] == pytest.approx(1 / 4)


# against independent formulas ---------------------------------------------------------------------------------------


def slow_loss(record: TokenRecord, proximal: list[float], config: LossConfig) -> float:
    total = 0.0
    reference = record.trainer.tolist() if record.reference is None else record.reference.tolist()
    for lp, mu, prox, ref, advantage in zip(
        record.trainer.tolist(),
        record.behaviour.tolist(),
        proximal,
        reference,
        record.advantages.tolist(),
        strict=True,
    ):
        weight = min(math.exp(prox - mu), config.cap)
        ratio = math.exp(lp - prox)
        if advantage >= 0:
            surrogate = min(ratio, 1 + config.clip_high) * advantage
        else:
            surrogate = max(ratio, 1 - config.clip_low) * advantage
        k3 = math.exp(ref - lp) - (ref - lp) - 1
        total += weight * (config.kl_coefficient * ratio * k3 - surrogate)
    return total


@pytest.mark.parametrize("correction", ["none", "truncated"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_agree_with_finite_differences_of_a_slow_formula(correction: str, kl: float) -> None:
    config = LossConfig(correction="none" if correction == "none" else "truncated", cap=1.3, kl_coefficient=kl)
    record = random_record(40, reference=True)
    proximal = (record.behaviour if correction == "none" else record.trainer.detach()).tolist()
    assert policy_loss(record, config)[0].item() == pytest.approx(slow_loss(record, proximal, config), rel=1e-12)
    analytic = gradient(record, config)
    for token in range(40):
        slopes = []
        for step in (1e-6, -1e-6):
            moved = record.trainer.detach().clone()
            moved[token] += step
            slopes.append(slow_loss(TokenRecord(moved, *parts_of(record)), proximal, config))
        assert analytic[token].item() == pytest.approx((slopes[0] - slopes[1]) / 2e-6, abs=1e-7)


def parts_of(record: TokenRecord) -> tuple[Tensor, Tensor, Tensor | None]:
    return record.behaviour, record.advantages, record.reference


def test_the_kl_gradient_is_that_of_the_exact_reverse_kl_in_expectation() -> None:
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, generator=draw, dtype=torch.float64), 0)
    behaviour = torch.log_softmax(torch.randn(6, generator=draw, dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    per_token = reverse_kl(
        policy, reference, (policy - behaviour).exp()
    )  # every token once, sampled from the behaviour
    estimate = torch.autograd.grad((behaviour.exp() * per_token).sum(), logits)[0]
    assert torch.allclose(estimate, exact, rtol=1e-12, atol=1e-14)


def test_the_policy_gradient_is_that_of_the_exact_return_in_expectation() -> None:
    draw = torch.Generator().manual_seed(6)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    behaviour = torch.log_softmax(torch.randn(6, generator=draw, dtype=torch.float64), 0)
    values = torch.randn(6, generator=draw, dtype=torch.float64)
    policy = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad(-(policy.exp() * values).sum(), logits, retain_graph=True)[0]
    terms = decoupled_terms(TokenRecord(policy, behaviour, values), policy.detach(), LossConfig(cap=1e9))
    estimate = torch.autograd.grad(-(behaviour.exp() * terms.weight * terms.surrogate).sum(), logits)[0]
    assert torch.allclose(estimate, exact, rtol=1e-12, atol=1e-14)


# sums ---------------------------------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 60), max_size=5), correction=st.sampled_from(["none", "truncated"]))
def test_cut_into_microbatches_loss_gradient_and_metrics_are_those_of_the_whole(
    cuts: list[int], correction: str
) -> None:
    config = LossConfig(correction="none" if correction == "none" else "truncated", kl_coefficient=0.1)
    whole = random_record(60, reference=True)
    bounds = [0, *sorted(cuts), 60]
    pieces = torch.zeros(60, dtype=torch.float64)
    sums = LossSums()
    for begin, end in itertools.pairwise(bounds):
        part = [None if values is None else values[begin:end] for values in parts_of(whole)]
        piece = TokenRecord(whole.trainer[begin:end], *part)  # type: ignore[arg-type]
        loss, part_sums = policy_loss(piece, config)
        pieces += torch.autograd.grad(loss, whole.trainer)[0]
        sums += part_sums
    _, expected = policy_loss(whole, config)
    assert torch.allclose(pieces, gradient(whole, config), rtol=1e-12, atol=0)
    assert sums.metrics() == pytest.approx(expected.metrics(), rel=1e-9)


def test_a_microbatch_without_tokens_is_zero_and_no_error() -> None:
    empty = TokenRecord(*(torch.zeros(0, dtype=torch.float64) for _ in range(3)))
    loss, sums = policy_loss(empty, PPO)
    assert loss.item() == 0.0
    assert sums == LossSums()


@pytest.mark.parametrize("config", [PPO, TRUNCATED], ids=["none", "truncated"])
def test_policies_absurdly_far_apart_give_finite_gradients(config: LossConfig) -> None:
    behaviour = torch.tensor([-200.0, -1e-3, -200.0, -1e-3])
    trainer = torch.tensor([-1e-3, -200.0, -1e-3, -200.0], requires_grad=True)
    record = TokenRecord(trainer, behaviour, torch.tensor([1.0, 1.0, -1.0, -1.0]), behaviour)
    loss, sums = policy_loss(record, LossConfig(correction=config.correction, kl_coefficient=0.1))
    assert torch.isfinite(torch.autograd.grad(loss, trainer)[0]).all()
    assert all(math.isfinite(value) for value in sums.metrics().values())


@given(gap=st.floats(-10, 10))
def test_k3_is_never_negative_and_zero_only_for_equal_policies(gap: float) -> None:
    estimate = k3_estimate(f64([-1.0]), f64([-1.0 + gap])).item()
    assert estimate >= 0.0
    assert estimate > 0.0 or abs(gap) < 1e-6

"""The estimators by hand, and their gradients against that of the exact KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rl.records import config_of, f64, moved, normalised, record_of
from torch import Tensor

from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.rl.kl import KlEstimator, kl_estimate, kl_penalty

LOG2 = math.log(2.0)
ALL: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -LOG2, 1.0 - LOG2), ("k2", LOG2**2 / 2, -LOG2), ("k3", 2.0 - 1.0 - LOG2, -LOG2)],
)
def test_value_and_slope_are_the_ones_computed_by_hand(estimator: KlEstimator, value: float, slope: float) -> None:
    record = record_of([(0.0, [1.0])], [LOG2])  # the reference finds the token twice as likely
    loss, gradient = normalised(record, config_of("dapo", kl_coefficient=0.5, kl_estimator=estimator))
    assert loss == pytest.approx(0.5 * value)
    assert gradient.item() == pytest.approx(0.5 * slope)


def test_off_policy_tokens_are_weighed_by_their_ratio() -> None:
    record = record_of([(0.0, [3.0])], [LOG2])
    loss, gradient = normalised(record, config_of("dapo", kl_coefficient=1.0))
    assert loss == pytest.approx(3.0 * (1.0 - LOG2))
    assert gradient.item() == pytest.approx(-3.0 * LOG2)


WEIGHTS = [
    ("dapo", "behaviour", Bounds("none"), 8.0),
    ("dapo", "behaviour", Bounds("truncated", 2.0), 2.0),
    ("dapo", "proximal", Bounds("none"), 2.0),  # pi / pi_prox alone
    ("dapo", "proximal", Bounds("truncated", 3.0), 6.0),  # pi_prox / mu is 4, held at 3
    ("gspo", "proximal", Bounds("icepop", 5.0), 8.0),
    ("cispo", "proximal", Bounds("none"), 5.0),  # its own bound
]


@pytest.mark.parametrize(("algorithm", "ratio", "bounds", "weight"), WEIGHTS)
def test_the_kl_of_a_token_has_the_bounded_weight_of_the_form(algorithm, ratio, bounds, weight: float) -> None:
    record = moved(record_of([(0.0, [8.0])], [LOG2]), [4.0])
    loss, gradient = normalised(record, config_of(algorithm, bounds, kl_coefficient=1.0, ratio=ratio))
    assert loss == pytest.approx(weight * (1.0 - LOG2))
    assert gradient.item() == pytest.approx(-weight * LOG2)


def drawn(seed: int) -> tuple[Tensor, ...]:
    """Logits of a policy, and the logprobs of that policy, a reference and a behaviour policy."""
    draw = torch.Generator().manual_seed(seed)
    logits, *others = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), *(torch.log_softmax(values, 0) for values in (logits, *others))


@pytest.mark.parametrize("estimator", ALL)
def test_the_gradient_is_that_of_the_exact_reverse_kl_in_expectation(estimator: KlEstimator) -> None:
    logits, policy, reference, behaviour = drawn(5)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    per_token = kl_penalty(estimator, policy, reference, (policy - behaviour).exp().detach())  # each token once,
    estimate = torch.autograd.grad((behaviour.exp() * per_token).sum(), logits)[0]  # sampled from the behaviour policy
    assert torch.allclose(estimate, exact, rtol=1e-12, atol=1e-14)


def test_kl_in_the_reward_has_the_gradient_of_the_exact_reverse_kl_in_expectation() -> None:
    logits, policy, reference, _ = drawn(9)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    behaviour = policy.detach()  # the policy that sampled
    per_reply = -(behaviour - reference) * policy  # reward times log pi, each reply once
    estimate = torch.autograd.grad((behaviour.exp() * per_reply).sum(), logits)[0]
    assert torch.allclose(estimate, -exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_are_right_on_average(estimator: KlEstimator) -> None:
    _, policy, reference, _ = drawn(7)
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * kl_estimate(estimator, policy, reference)).sum().item() == pytest.approx(exact.item())


@given(gap=st.floats(-10, 10))
def test_k2_and_k3_are_never_negative_and_zero_only_for_equal_policies(gap: float) -> None:
    for estimator in ("k2", "k3"):
        estimate = kl_estimate(estimator, f64([-1.0]), f64([-1.0 + gap])).item()  # type: ignore[arg-type]
        assert estimate >= 0.0
        assert estimate > 0.0 or abs(gap) < 1e-6

"""The estimators by hand, and their gradients against that of the exact KL."""

import math
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.rl.records import config_of, f64, moved, normalised, record_of

from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.rl.kl import KlEstimator, kl_estimate, kl_penalty

LOG2 = math.log(2.0)
ALL: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


BY_HAND = [
    # of a token that the reference finds twice as likely
    ("k1", "dapo", "behaviour", Bounds("none"), 1.0, -LOG2, 1.0 - LOG2),
    ("k2", "dapo", "behaviour", Bounds("none"), 1.0, LOG2**2 / 2, -LOG2),
    ("k3", "dapo", "behaviour", Bounds("none"), 1.0, 1.0 - LOG2, -LOG2),
    # weighed by pi / mu = 8, of which pi_prox / mu is 4
    ("k3", "dapo", "behaviour", Bounds("none"), 8.0, 8.0 * (1.0 - LOG2), -8.0 * LOG2),
    ("k3", "dapo", "behaviour", Bounds("truncated", 2.0), 8.0, 2.0 * (1.0 - LOG2), -2.0 * LOG2),
    ("k3", "dapo", "proximal", Bounds("none"), 8.0, 2.0 * (1.0 - LOG2), -2.0 * LOG2),  # pi / pi_prox alone
    ("k3", "dapo", "proximal", Bounds("truncated", 3.0), 8.0, 6.0 * (1.0 - LOG2), -6.0 * LOG2),  # 4 is held at 3
    ("k3", "gspo", "proximal", Bounds("icepop", 5.0), 8.0, 8.0 * (1.0 - LOG2), -8.0 * LOG2),
    ("k3", "cispo", "proximal", Bounds("none"), 8.0, 5.0 * (1.0 - LOG2), -5.0 * LOG2),  # its own bound
]


@pytest.mark.parametrize(("estimator", "algorithm", "form", "bounds", "ratio", "value", "slope"), BY_HAND)
def test_value_slope_and_weight_are_the_ones_computed_by_hand(estimator, algorithm, form, bounds, ratio, value, slope):
    record = moved(record_of([(0.0, [ratio])], [LOG2]), [ratio / 2])
    config = config_of(algorithm, bounds, kl_coefficient=0.5, kl_estimator=estimator, ratio=form)
    loss, gradient = normalised(record, config)
    assert loss == pytest.approx(0.5 * value)
    assert gradient.item() == pytest.approx(0.5 * slope)


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

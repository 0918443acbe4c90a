r"""The penalty that keeps a policy near a reference: KL(pi || ref) per token, estimated at tokens of the behaviour policy.

With l = log pi / ref at the sampled token, Schulman's estimators (http://joschu.net/blog/kl-approx.html) are, under tokens of pi itself,

    k1 = l                      unbiased, of either sign, noisy
    k2 = l^2 / 2                biased, small, never negative
    k3 = exp(-l) - 1 + l        unbiased and never negative

That says nothing of their *gradients*. The gradient of KL(pi || ref) is E_pi[l grad(log pi)]. Differentiating an estimator at sampled tokens gives something
else for two of the three: for k1 it is E[grad(log pi)] = 0, no penalty at all, and for k3 it follows the forward KL(ref || pi). k2's is right. What is wrong is
that the sampling depends on pi as well; with the ratio r = pi / mu in front, *and its gradient*, all are put right (DeepSeek-V3.2, arXiv 2512.02556, section
3.1; verl#2953; arXiv 2506.09477):

    grad(r k1) = r (l + 1) grad(log pi)      the 1 has expectation 0: right on average, with more noise
    grad(r k3) = r l grad(log pi)

and k2 is taken as r l grad(log pi), with the ratio as a mere weight. So k2 and k3 train alike here and differ in the figure they report. The right-hand
sides are what is computed: r k3 itself subtracts large numbers where the policies lie far apart. `losses` bounds r as the form of the job's ratio does.

In the reward (Ziegler et al., arXiv 1909.08593, section 2, equation 2; RLOO, arXiv 2402.14740, section 2; REINFORCE++, arXiv 2501.03262):

    R' = R - coefficient sum over the trajectory's tokens of log mu / ref

before rewards are compared. It is k1, whose mean over tokens of mu is KL(mu || ref), and whose policy gradient E[l_total grad(log pi)] is that of the KL of
whole replies; k2 and k3 have other gradients there (arXiv 2510.01555). The numerator is mu, as recorded by the engine: a reward is a property of a
sample, so its KL is that of the policy that sampled, exact at any staleness and the same at every replay. With the trainer's logprobs it would be that of a
policy that did not sample, and cost one more forward pass.
"""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio before exp: beyond it a token is hopeless, and inf times a gradient of zero would be NaN."""


def kl_estimate(estimator: KlEstimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(pi || ref) at each token [T], from its logprobs [T] under both."""
    gap = logprobs - reference
    match estimator:
        case "k1":
            return gap
        case "k2":
            return 0.5 * gap**2
    return exp(-gap) - 1.0 + gap.clamp(min=-MAX_LOG_RATIO)


def kl_penalty(estimator: KlEstimator, logprobs: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """Per token [T]: weight times the estimate in value, and the right gradient as written above. weight: importance weight without gradient [T]."""
    value = kl_estimate(estimator, logprobs.detach(), reference)
    slope = logprobs.detach() - reference + (1.0 if estimator == "k1" else 0.0)
    return weight * (value + slope * (logprobs - logprobs.detach()))


def exp(log_ratios: Tensor) -> Tensor:
    """Ratios of log ratios, finite."""
    return torch.exp(log_ratios.clamp(max=MAX_LOG_RATIO))

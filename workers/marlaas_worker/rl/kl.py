r"""Penalty that keeps a policy near a reference: KL(pi || ref) per token, estimated at tokens sampled by the behaviour policy.

With l = log(pi / ref) at the sampled token, Schulman's estimators (http://joschu.net/blog/kl-approx.html) are,
for tokens sampled from pi itself,

    k1 = l                      unbiased, of either sign, noisy
    k2 = l^2 / 2                biased, small, never negative
    k3 = exp(-l) - 1 + l        unbiased and, up to rounding, never negative

Unbiased values do not imply unbiased *gradients*. The gradient of KL(pi || ref) is E_pi[l grad(log pi)].
Differentiating an estimator at sampled tokens gives another result for two of the three:

    k1    E[grad(log pi)] = 0, which is no penalty
    k2    the right gradient
    k3    the gradient of the forward KL(ref || pi)

The error is that the sampling also depends on pi. The ratio r = pi / mu in front, *with its gradient*, corrects
k1 and k3 (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; verl#2953; arXiv 2506.09477):

    grad(r k1) = r (l + 1) grad(log pi)      the 1 has expectation 0: right on average, with more noise
    grad(r k3) = r l grad(log pi)

For k2 the gradient r l grad(log pi) is used, with the ratio as a weight without gradient. So k2 and k3 train
alike here and differ only in the reported metric. The code computes the right-hand sides, because r k3 itself
subtracts large numbers where the policies are far apart. `losses` bounds r by the job's form of the ratio.

KL in the reward (Ziegler et al., arXiv 1909.08593, section 2, equation 2; RLOO, arXiv 2402.14740, section 2;
REINFORCE++, arXiv 2501.03262) is subtracted before rewards are compared:

    R' = R - coefficient sum over the trajectory's tokens of log(mu / ref)

This is k1. Its mean over tokens of mu is KL(mu || ref), and its policy gradient E[l_total grad(log pi)] is that
of the KL of whole replies; k2 and k3 have other gradients there (arXiv 2510.01555).
The numerator is mu, as recorded by the engine. A reward is a property of a sample, so its KL is that of the
policy that sampled it: exact at any staleness, and the same at every replay. The trainer's logprobs would give
the KL of a policy that did not sample, and cost one more forward pass.
"""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio before exp: without it exp may overflow, and inf times a gradient of zero is NaN."""


def kl_estimate(estimator: KlEstimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate of KL(pi || ref) at each token [T], from the token's logprobs under pi and under ref [T]."""
    gap = logprobs - reference
    match estimator:
        case "k1":
            return gap
        case "k2":
            return 0.5 * gap**2
    return exp(-gap) - 1.0 + gap.clamp(min=-MAX_LOG_RATIO)


def kl_penalty(estimator: KlEstimator, logprobs: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """Return, per token [T], weight times the estimate, with the corrected gradient of the module's docstring.

    weight: importance weight without gradient [T].
    """
    value = kl_estimate(estimator, logprobs.detach(), reference)
    slope = logprobs.detach() - reference + (1.0 if estimator == "k1" else 0.0)
    return weight * (value + slope * (logprobs - logprobs.detach()))


def exp(log_ratios: Tensor) -> Tensor:
    """Exponentiate log ratios, bounded by MAX_LOG_RATIO so that the result is finite."""
    return torch.exp(log_ratios.clamp(max=MAX_LOG_RATIO))

r"""What is done about tokens on which the sampler and the trainer disagree, by a ratio at the fixed parameters of a step, without gradient.

In the proximal form the ratio is c = pi_prox / mu, and a token's surrogate is multiplied by a weight w. In the behaviour form, and for CISPO, it is
r = pi / mu, which the surrogate holds already: there only the bounds act (with one update a step the two ratios are equal in value).

    truncated        w = min(c, cap) (IMPALA, arXiv 1802.01561; https://fengyao.notion.site/off-policy-rl). In the behaviour form no token weighs more
                     than cap: where the algorithm's clip already bounds the weight this changes nothing, and it closes the side that
                     min(r A, clip(r) A) leaves open, A < 0 and r > 1 + high (dual-clip PPO, arXiv 1912.09729, section 4).
    masked-token     w = c; tokens with c > cap do not count (masked importance sampling; slime#657, TRL's token_mask).
    masked-sequence  w = c; segments whose tokens' c multiply to more than cap do not count (TRL's sequence_mask, which also weighs by the product).
    icepop           w = c; tokens outside floor <= c <= cap do not count (IcePop: Ring-1T, arXiv 2510.18855; 0.5 and 5 there).
    none             w = 1: tokens train as if pi_prox had sampled them. In the behaviour form r stays as it is.

What does not count contributes nothing and leaves every denominator (slime#657): see `losses`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import Correction
from marlaas_worker.rl.kl import exp

CAPS: Mapping[Correction, float] = {"truncated": 2.0, "masked-token": 3.0, "masked-sequence": 3.0, "icepop": 5.0}
"""Largest ratio, unless the job chooses: of https://fengyao.notion.site/off-policy-rl, of TRL's masks, of IcePop."""
FLOOR = 0.5
"""IcePop's smallest ratio, unless the job chooses."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A correction with its numbers; floor is icepop's alone."""

    type: Correction = "truncated"
    cap: float = 2.0
    floor: float = FLOOR


def counted(log_ratios: Tensor, sequences: Tensor, bounds: Bounds) -> Tensor | None:
    """Return which tokens count, bool [T], by the logs of their ratios [T] and their segments, int64 [T]; None if all do.

    A NaN counts, so that it makes the gradient NaN instead of being masked away.
    """
    match bounds.type:
        case "masked-token":
            return ~(log_ratios.exp() > bounds.cap)
        case "masked-sequence":
            return ~(sums_of(log_ratios, sequences)[sequences].exp() > bounds.cap)
        case "icepop":
            ratios = log_ratios.exp()
            return ~((ratios < bounds.floor) | (ratios > bounds.cap))
    return None


def bounded(weights: Tensor, bounds: Bounds) -> Tensor:
    """Importance weights as the correction leaves them."""
    return weights.clamp(max=bounds.cap) if bounds.type == "truncated" else weights


def weights_of(log_ratios: Tensor, bounds: Bounds) -> Tensor:
    """The proximal form's weights w [T], of the logs of c = pi_prox / mu [T]."""
    return torch.ones_like(log_ratios) if bounds.type == "none" else bounded(exp(log_ratios), bounds)


def sums_of(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum of each sequence's values: [T] and int64 [T] below S to [S], with gradient."""
    size = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(size).index_add(0, sequences, values)


def means_of(values: Tensor, sequences: Tensor) -> Tensor:
    """Mean over its own sequence's values, for each token: [T] and int64 [T] to [T], with gradient."""
    means = sums_of(values, sequences) / torch.bincount(sequences).clamp(min=1)
    return means[sequences]

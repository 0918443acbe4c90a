r"""Corrections for tokens on which sampler and trainer disagree, from the ratio of their probabilities, without gradient.

In the proximal form the ratio is c = pi_prox / mu, and a token's surrogate is multiplied by a weight w. In the
behaviour form, and for CISPO, the ratio is r = pi / mu. The surrogate already contains r, so only the bounds
act there. (In the first update of a step the two ratios are equal in value.)

    truncated        w = min(c, cap) (IMPALA, arXiv 1802.01561; https://fengyao.notion.site/off-policy-rl).
                     In the behaviour form no token weighs more than cap. Where the algorithm's clip already bounds the
                     weight, this changes nothing. It also bounds the case that min(r A, clip(r) A) leaves unbounded:
                     A < 0 and r > 1 + high (dual-clip PPO, arXiv 1912.09729, section 4).
    masked-token     w = c; tokens with c > cap do not count (masked importance sampling; slime#657, TRL's token_mask).
    masked-sequence  w = c; segments whose product of c over their tokens exceeds cap do not count (TRL's
                     sequence_mask, which also weighs by the product).
    icepop           w = c; tokens outside floor <= c <= cap do not count (IcePop: Ring-1T, arXiv 2510.18855, with floor
                     0.5 and cap 5).
    none             w = 1: tokens train as if pi_prox had sampled them. In the behaviour form r is left unchanged.

For a ratio of a sequence (gspo), c is the geometric mean over a segment, so whole segments count or do not
(`losses.kept`). A token that does not count contributes nothing and is left out of every denominator (slime#657): see `losses`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import Correction
from marlaas_worker.rl.kl import exp

CAPS: Mapping[Correction, float] = {"truncated": 2.0, "masked-token": 3.0, "masked-sequence": 3.0, "icepop": 5.0}
"""Default `Bounds.cap` by correction; sources: https://fengyao.notion.site/off-policy-rl, TRL's masks, IcePop."""
FLOOR = 0.5
"""Default `Bounds.floor` (IcePop)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A correction for tokens on which sampler and trainer disagree, and its bounds of the probability ratio.

    Attributes:
        type: name of the correction, as in the module's table.
        cap: largest ratio; `none` does not use it.
        floor: smallest ratio; only `icepop` uses it.
    """

    type: Correction = "truncated"
    cap: float = 2.0
    floor: float = FLOOR


def counted(log_ratios: Tensor, sequences: Tensor, bounds: Bounds) -> Tensor | None:
    """Return which tokens the correction leaves in the loss (they *count*), bool [T]; None if it leaves all of them.

    A NaN counts, so that it makes the gradient NaN and is detected instead of being masked.

    Args:
        log_ratios: natural logarithms [T] of the tokens' ratios pi_prox / mu (behaviour form: pi / mu).
        sequences: number of each token's segment, int64 [T].
        bounds: the correction, with its cap and floor.
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
    """Clamp importance weights to the cap if the correction is `truncated`; other corrections leave them unchanged."""
    return weights.clamp(max=bounds.cap) if bounds.type == "truncated" else weights


def weights_of(log_ratios: Tensor, bounds: Bounds) -> Tensor:
    """Return the weights w [T] that the correction gives the tokens in the proximal form, from log c = log(pi_prox / mu) [T]."""
    return torch.ones_like(log_ratios) if bounds.type == "none" else bounded(exp(log_ratios), bounds)


def sums_of(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the sum of the values [T] of each sequence, [S], with gradient. sequences: each value's sequence, int64 [T], from 0 to S - 1."""
    size = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(size).index_add(0, sequences, values)


def means_of(values: Tensor, sequences: Tensor) -> Tensor:
    """Return for each token the mean of the values [T] over the token's sequence, [T], with gradient. sequences: as for `sums_of`."""
    means = sums_of(values, sequences) / torch.bincount(sequences).clamp(min=1)
    return means[sequences]

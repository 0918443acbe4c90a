r"""What is done about tokens that trainer and sampler disagree on, by r = pi / mu at the fixed parameters of a step; no gradient flows through it.

    truncated        weight min(r, cap) instead of r (IMPALA, arXiv 1802.01561; https://fengyao.notion.site/off-policy-rl). Where the algorithm's clip
                     already bounds the weight it changes nothing: it closes the side that min(r A, clip(r) A) leaves open, A < 0 and r > 1 + high
                     (dual-clip PPO, arXiv 1912.09729, section 4).
    masked-token     tokens with r > cap do not count (masked importance sampling; slime#657, TRL's token_mask).
    masked-sequence  sequences whose tokens' r multiply to more than cap do not count (TRL's sequence_mask).
    icepop           tokens outside floor <= r <= cap do not count (IcePop: Ring-1T, arXiv 2510.18855; 0.5 and 5 there).
    none             nothing.

What does not count contributes nothing, and leaves every denominator too (slime#657): a token the step's and its sequence's count of tokens, a sequence
without a token left the count of sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import Correction

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
    """Which tokens count, bool [T], of their log pi / mu [T] and the sequences they belong to, int64 [T]; None if all do.

    A ratio that is no number counts, so that it ruins the gradient loudly instead of going unseen.
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


def sums_of(values: Tensor, sequences: Tensor) -> Tensor:
    """Sum of each sequence's values: [T] and int64 [T] below S to [S], with gradient."""
    size = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(size).index_add(0, sequences, values)


def lengths_of(sequences: Tensor) -> Tensor:
    """Tokens of each sequence, int64 [S]; 0 for one whose tokens are not here."""
    return torch.bincount(sequences)

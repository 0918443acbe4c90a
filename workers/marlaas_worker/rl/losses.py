r"""The policy loss of one micro-batch: a pure function of a record of generated tokens, summed and not yet normalised.

`algorithms` says what is computed, `corrections` what is left out of it, `kl` what is added:

    L = sum over what counts of n_t (-surrogate(r_t, A) + kl.coefficient * min(r_t, cap) k_t),    n_t = 1/|o| for the normaliser `sequence`, else 1

r_t is pi / mu, with the gradient, and is the only ratio there is: nothing is weighted twice. *When the clip binds*: a batch gets exactly one optimizer step,
at parameters that are fixed while its gradient adds up, so r does not move while it is trained. It is away from 1 by staleness and by the mismatch of
sampler and trainer; at maxStaleness 0 by rounding alone, and then no clip, cap or mask does anything, whatever the algorithm.

Normalisation is over the *step* and is the caller's: divide at the end by the sum of `denominator`. No sequence is cut between micro-batches and no statistic
here spans more than one sequence, so the gradient of a step is the plain sum over its sequences however they are dealt out.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import GRPO, Rule
from marlaas_worker.rl.corrections import Bounds, bounded, counted, lengths_of, sums_of
from marlaas_worker.rl.kl import KlEstimator, exp, kl_estimate, kl_penalty


@dataclass(frozen=True, slots=True)
class LossConfig:
    """A rule with the numbers of a job. budget: the constant of the normaliser `budget`, in tokens."""

    rule: Rule = GRPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Bounds = field(default_factory=Bounds)
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    budget: int = 1


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Generated tokens, in any order; all [T]. trainer carries the gradient.

    trainer, behaviour, reference: logprobs of the tokens under the three policies at one temperature. advantages: of each token's trajectory.
    sequences: int64, from 0, which sequence of this micro-batch a token belongs to; all of a sequence's generated tokens are here.
    """

    trainer: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor
    reference: Tensor | None = None

    def where(self, keep: Tensor) -> "TokenRecord":
        """Some of the tokens; keep is bool [T]."""
        reference = None if self.reference is None else self.reference[keep]
        return TokenRecord(
            self.trainer[keep], self.behaviour[keep], self.advantages[keep], self.sequences[keep], reference
        )


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over tokens, to be added up over a step's micro-batches; `ratio` is pi / mu, untouched. ratio_max is a maximum.

    num_tokens: all of them. num_counted, num_sequences: what the correction left. denominator: what the step's gradient is divided by.
    """

    num_tokens: int = 0
    num_counted: int = 0
    num_sequences: int = 0
    denominator: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    clipped: float = 0.0
    truncated: float = 0.0
    gap: float = 0.0
    surprise: float = 0.0
    behaviour_kl: float = 0.0
    reference_kl: float = 0.0
    ratio_max: float = 0.0

    def __add__(self, other: "LossSums") -> "LossSums":
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return LossSums(**{**sums, "ratio_max": max(self.ratio_max, other.ratio_max)})

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by the names under which a manifest carries them.

        loss: what is differentiated, over the step's denominator. clip_fraction: where the algorithm's clip took hold. truncated_fraction,
        masked_fraction: where the correction did. entropy: estimated by -mean(lp) at the sampled tokens. logprob_gap: mean |lp - mu|. ess: effective
        sample size as a share of the tokens, (sum r)^2 / (T * sum r^2). behaviour_kl: KL(mu || pi) by k3. kl: KL(pi || ref) by the job's estimator, over
        tokens of the behaviour policy.
        """
        count = max(self.num_tokens, 1)
        means = {
            "ratio_mean": self.ratio,
            "clip_fraction": self.clipped,
            "truncated_fraction": self.truncated,
            "masked_fraction": float(self.num_tokens - self.num_counted),
            "logprob_gap": self.gap,
            "entropy": self.surprise,
            "behaviour_kl": self.behaviour_kl,
            "kl": self.reference_kl,
        }
        ess = self.ratio**2 / (count * self.ratio_squared) if self.ratio_squared else 0.0
        return {name: value / count for name, value in means.items()} | {
            "loss": self.loss / max(self.denominator, 1),
            "ratio_max": self.ratio_max,
            "ess": ess,
            "tokens": float(self.num_tokens),
            "sequences": float(self.num_sequences),
        }


class Surrogate(NamedTuple):
    """What is maximised, per token [T] with gradient, and where the algorithm's clip and the correction's cap took hold."""

    value: Tensor
    clipped: Tensor
    truncated: Tensor


def policy_loss(record: TokenRecord, config: LossConfig) -> tuple[Tensor, LossSums]:
    """Return the loss summed over the record's tokens (a scalar with gradient), and its sums."""
    keep = counted(record.trainer.detach() - record.behaviour, record.sequences, config.correction)
    left = record if keep is None else record.where(keep)
    found = surrogate(left, config)
    per_token = -found.value
    if left.reference is not None:
        weight = bounded(exp(left.trainer.detach() - left.behaviour), config.correction)
        kl = kl_penalty(config.kl_estimator, left.trainer, left.reference, weight)
        per_token = per_token + config.kl_coefficient * kl
    if config.rule.normaliser == "sequence":
        per_token = per_token / lengths_of(left.sequences)[left.sequences]
    total = per_token.sum()
    return total, _sums(record, left, config, (total, found))


def surrogate(record: TokenRecord, config: LossConfig) -> Surrogate:
    """The rule's surrogate for every token; none of its weights is above the correction's cap."""
    log_ratios = record.trainer - record.behaviour
    if config.rule.ratio == "sequence":
        means = sums_of(log_ratios, record.sequences) / lengths_of(record.sequences).clamp(min=1)
        log_ratios = means[record.sequences]
    ratio, advantages = exp(log_ratios), record.advantages
    fixed, one = ratio.detach(), exp(log_ratios - log_ratios.detach())
    truncated = bounded(fixed, config.correction) < fixed
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    match config.rule.surrogate:
        case "weighted":
            return Surrogate(
                bounded(fixed, config.correction) * one * advantages, torch.zeros_like(truncated), truncated
            )
        case "capped":
            weight = bounded(clipped.detach(), config.correction)
            return Surrogate(weight * one * advantages, clipped.detach() != fixed, truncated)
    bound = torch.where(truncated, bounded(fixed, config.correction) / fixed, torch.ones_like(fixed))
    free, held = ratio * advantages, clipped * advantages
    return Surrogate(bound * torch.minimum(free, held), held < free, truncated)


def _denominator(config: LossConfig, num_tokens: int, num_sequences: int) -> int:
    match config.rule.normaliser:
        case "token":
            return num_tokens
        case "budget":
            return num_sequences * config.budget
    return num_sequences


@torch.no_grad()
def _sums(record: TokenRecord, left: TokenRecord, config: LossConfig, result: tuple[Tensor, Surrogate]) -> LossSums:
    total, found = result
    trainer, behaviour = record.trainer.double(), record.behaviour.double()
    ratio = exp(trainer - behaviour)
    reference = trainer if record.reference is None else record.reference.double()
    per_token = (
        ratio,
        ratio**2,
        found.clipped.double(),
        found.truncated.double(),
        (trainer - behaviour).abs(),
        -trainer,
        kl_estimate("k3", behaviour, trainer),
        kl_estimate(config.kl_estimator, trainer, reference),
    )
    biggest = ratio.max() if len(ratio) else ratio.sum()
    num_sequences = (lengths_of(left.sequences) > 0).sum()
    figures = torch.stack([num_sequences.double(), total.double(), *(each.sum() for each in per_token), biggest])
    sequences, *sums = figures.tolist()
    counts = len(ratio), len(left.trainer), int(sequences)
    return LossSums(*counts, _denominator(config, *counts[1:]), *sums)

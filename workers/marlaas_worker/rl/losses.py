r"""The policy loss of one micro-batch: a pure function of a record of generated tokens, summed and not yet normalised.

`algorithms` says what is computed, `corrections` which tokens count and with which weight w, `kl` and the entropy what is added. With |o| the generated
tokens of a token's trajectory, counted or not, and n_t = 1/|o| for the normaliser `sequence`, else 1:

    L = sum over tokens that count of n_t (-w surrogate(ratio_t, A) + kl.coefficient v k_t - entropy.coefficient H_t)

The KL's weight v is the token's importance weight: w rho, or min(r, cap) in the behaviour form, or CISPO's own. The entropy H_t = -sum_x pi(x) log pi(x) is
that of the full softmax after the tokens before t (PPO, arXiv 1707.06347, section 5, equation 9). It has no importance weight: it does not depend on the
token sampled at t, and the mean of c over that token is 1. The mean of -log pi at sampled tokens would be no substitute: its gradient has expectation zero.

Normalisation is over the *step* and is the caller's: divide at the end by the sum of `denominator`. With N the sum of 1/|o| over the tokens that count, the
denominator is their number for the normaliser `token`, N budget for `budget`, else N. N is the number of trajectories, each by its share of tokens that
count. So a token that does not count leaves the sum and the denominator, and both are sums over tokens: |o| is known beforehand, no statistic spans more
than one segment, and the gradient of a step is the same however its segments are dealt out to micro-batches.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import GRPO, Ratio, Rule
from marlaas_worker.rl.corrections import Bounds, bounded, counted, means_of, weights_of
from marlaas_worker.rl.kl import KlEstimator, exp, kl_estimate, kl_penalty


@dataclass(frozen=True, slots=True)
class LossConfig:
    """A rule with the numbers of a job. budget: the constant of the normaliser `budget`, in tokens."""

    rule: Rule = GRPO
    ratio: Ratio = "proximal"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Bounds = field(default_factory=Bounds)
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0
    budget: int = 1

    @property
    def is_proximal(self) -> bool:
        """Whether pi_prox / mu is a weight of its own; never for `capped`, whose clip bounds pi / mu by definition."""
        return self.ratio == "proximal" and self.rule.surrogate != "capped"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Generated tokens, in any order; all [T]. trainer and entropies carry the gradient.

    trainer, behaviour, reference, proximal: logprobs of the tokens under pi, mu, the KL reference and pi_prox at one temperature. proximal: None stands for
    trainer without its gradient, which it is with one update a step. advantages: of each token's trajectory. sequences: int64, from 0, the segment of this
    micro-batch that a token belongs to; all of a segment's generated tokens are here. lengths: generated tokens of each token's trajectory, here or not.
    entropies: of the full softmax that each token was drawn from, under pi.
    """

    trainer: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Tensor
    lengths: Tensor
    reference: Tensor | None = None
    proximal: Tensor | None = None
    entropies: Tensor | None = None

    def where(self, keep: Tensor) -> "TokenRecord":
        """Some of the tokens; keep is bool [T]."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: value[keep] for name, value in values.items() if value is not None})

    def fixed(self, config: LossConfig) -> Tensor:
        """Logprobs without gradient of the policy that the correction compares with mu: pi_prox, or pi in the behaviour form."""
        return self.trainer.detach() if self.proximal is None or not config.is_proximal else self.proximal


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over tokens, to be added up over a step's micro-batches; `ratio` is pi / mu, untouched. ratio_max is a maximum.

    num_tokens: all of them. num_counted: those that the correction left. num_sequences: trajectories, each by its share of tokens that count.
    denominator: what the step's gradient is divided by.
    """

    num_tokens: int = 0
    num_counted: int = 0
    num_sequences: float = 0.0
    denominator: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    clipped: float = 0.0
    truncated: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    behaviour_kl: float = 0.0
    reference_kl: float = 0.0
    ratio_max: float = 0.0

    def __add__(self, other: "LossSums") -> "LossSums":
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return LossSums(**{**sums, "ratio_max": max(self.ratio_max, other.ratio_max)})

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by the names under which a manifest carries them.

        Of r = pi / mu, before any bound and in both forms: ratio_mean, ratio_max; ess, the effective sample size as a share of the tokens,
        (sum r)^2 / (T sum r^2); logprob_gap, mean |log r|; behaviour_kl, KL(mu || pi) by k3. With one update a step r is also pi_prox / mu.

        clip_fraction: tokens on which the algorithm's clip took hold, of rho in the proximal form (0 with one update a step), of r in the behaviour form
        and for cispo. truncated_fraction, masked_fraction: tokens whose weight the correction lowered, and that it left out, by pi_prox / mu (behaviour
        form: r). loss: what is differentiated, over the step's denominator. entropy: of the full softmax if the job has an entropy bonus, else estimated
        by the mean of -log pi at the sampled tokens. kl: KL(pi || ref) by the job's estimator, over tokens of the behaviour policy; mean of log mu / ref
        where it is part of the reward. sequences: trajectories, each by its share of tokens that count.
        """
        count = max(self.num_tokens, 1)
        means = {
            "ratio_mean": self.ratio,
            "clip_fraction": self.clipped,
            "truncated_fraction": self.truncated,
            "masked_fraction": float(self.num_tokens - self.num_counted),
            "logprob_gap": self.gap,
            "entropy": self.entropy,
            "behaviour_kl": self.behaviour_kl,
            "kl": self.reference_kl,
        }
        ess = self.ratio**2 / (count * self.ratio_squared) if self.ratio_squared else 0.0
        return {name: value / count for name, value in means.items()} | {
            "loss": self.loss / self.denominator if self.denominator else 0.0,
            "ratio_max": self.ratio_max,
            "ess": ess,
            "tokens": float(self.num_tokens),
            "sequences": round(self.num_sequences, 6),
        }


class Surrogate(NamedTuple):
    """What is maximised, per token [T] with gradient, and where the algorithm's clip and the correction's cap took hold."""

    value: Tensor
    clipped: Tensor
    truncated: Tensor


def policy_loss(record: TokenRecord, config: LossConfig) -> tuple[Tensor, LossSums]:
    """Return the loss summed over the record's tokens (a scalar with gradient), and its sums."""
    keep = counted(record.fixed(config) - record.behaviour, record.sequences, config.correction)
    left = record if keep is None else record.where(keep)
    found = surrogate(left, config)
    per_token = -found.value
    if left.reference is not None:
        kl = kl_penalty(config.kl_estimator, left.trainer, left.reference, kl_weights(left, config))
        per_token = per_token + config.kl_coefficient * kl
    if left.entropies is not None:
        per_token = per_token - config.entropy_coefficient * left.entropies
    if config.rule.normaliser == "sequence":
        per_token = per_token / left.lengths
    total = per_token.sum()
    return total, _sums(record, left, config, (total, found))


def surrogate(record: TokenRecord, config: LossConfig) -> Surrogate:
    """The rule's surrogate for every token, times its weight."""
    fixed = record.fixed(config)
    moved, away = record.trainer - (fixed if config.is_proximal else record.behaviour), fixed - record.behaviour
    if config.rule.ratio == "sequence":
        moved, away = means_of(moved, record.sequences), means_of(away, record.sequences)
    ratio, weight, mismatch = exp(moved), weights_of(away, config.correction), exp(away)
    truncated = bounded(mismatch, config.correction) < mismatch
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    if config.rule.surrogate == "capped":
        weight, one = bounded(clipped.detach(), config.correction), exp(moved - moved.detach())
        return Surrogate(weight * one * record.advantages, clipped.detach() != ratio.detach(), truncated)
    if not config.is_proximal:  # the ratio is the weight already: it is scaled down to the cap
        weight = torch.where(truncated, bounded(mismatch, config.correction) / mismatch, torch.ones_like(mismatch))
    free = ratio * record.advantages
    held = free if config.rule.surrogate == "weighted" else clipped * record.advantages
    return Surrogate(weight * torch.minimum(free, held), held < free, truncated)


def kl_weights(record: TokenRecord, config: LossConfig) -> Tensor:
    """The importance weight of each token's KL [T], without gradient: of tokens, whatever the level of the rule's ratio."""
    trainer, fixed = record.trainer.detach(), record.fixed(config)
    if config.is_proximal:
        return weights_of(fixed - record.behaviour, config.correction) * exp(trainer - fixed)
    ratio = exp(trainer - record.behaviour)
    if config.rule.surrogate == "capped":
        ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return bounded(ratio, config.correction)


def _denominator(config: LossConfig, num_tokens: int, num_sequences: float) -> float:
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
        -trainer if record.entropies is None else record.entropies.double(),
        kl_estimate("k3", behaviour, trainer),
        kl_estimate(config.kl_estimator, trainer, reference),
    )
    biggest = ratio.max() if len(ratio) else ratio.sum()
    shares = (1.0 / left.lengths.double()).sum()
    figures = torch.stack([shares, total.double(), *(each.sum() for each in per_token), biggest])
    num_sequences, *sums = figures.tolist()
    counts = len(ratio), len(left.trainer)
    return LossSums(*counts, num_sequences, _denominator(config, counts[1], num_sequences), *sums)

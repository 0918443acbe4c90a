r"""Policy loss of one micro-batch: a pure function of a record of generated tokens, summed and not yet normalised.

`algorithms` defines the surrogate, `corrections` which tokens count and their weight w, `kl` the KL term. With |o| the
number of generated tokens of a token's trajectory, counted or not, and n_t = 1/|o| for the normaliser `sequence`, else 1:

    L = sum over tokens that count of n_t (-w surrogate(ratio_t, A) + kl.coefficient v k_t - entropy.coefficient H_t)

The KL's weight v is the token's importance weight: w rho; in the behaviour form min(r, cap); for CISPO its own weight.

The entropy H_t = -sum_x pi(x) log pi(x) is that of the full softmax after the tokens before t (PPO, arXiv
1707.06347, section 5, equation 9). It has no importance weight: it does not depend on the token sampled at t,
and the mean of c over that token is 1. The mean of -log pi at sampled tokens cannot replace it, because its
gradient has expectation zero.

The caller normalises over an optimizer *update*: it divides the gradient by the sum of `LossSums.denominator` over the
update's micro-batches. Let N be the sum of 1/|o| over the tokens that count: the number of trajectories, each weighted by
its share of tokens that count. The denominator is the number of tokens that count for the normaliser `token`, N times
budget for `budget`, and N for `sequence` and `sum`.
A token that does not count is thus left out of both the loss and the denominator. Both are sums over tokens, |o|
is known beforehand, and no statistic spans more than one segment. So the gradient of an update does not depend on
how its segments are distributed over micro-batches.
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
    """The loss of a job: an algorithm's rule, and the job's parameters.

    Attributes:
        rule: the algorithm's row of the table `algorithms.ALGORITHMS`.
        ratio: proximal clips pi / pi_prox and weighs by pi_prox / mu; behaviour clips pi / mu. pi is the trainer's present policy, pi_prox
            the trainer's at the step's beginning, and mu the policy that sampled the token.
        clip_low, clip_high: bound the ratio to [1 - clip_low, 1 + clip_high].
        correction: which tokens count and how they are weighed where sampler and trainer disagree.
        kl_coefficient: factor of the KL term in the loss; 0 if the job has no KL penalty, or subtracts it from the reward.
        kl_estimator: estimator of the KL term.
        entropy_coefficient: factor of the entropy bonus; 0: none.
        budget: the constant of the normaliser `budget`, in tokens (`rollout.maxTokens`).
    """

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
        """Whether pi_prox / mu is a separate weight: never for `capped`, whose clip bounds pi / mu, or `likelihood`, which has no ratio."""
        return self.ratio == "proximal" and self.rule.surrogate not in ("capped", "likelihood")

    @property
    def is_likelihood(self) -> bool:
        """Whether the tokens were demonstrated: no policy has sampled them, so ratios have no meaning."""
        return self.rule.surrogate == "likelihood"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Generated tokens of a micro-batch, in any order; all fields are [T]. trainer and entropies carry the gradient.

    Attributes:
        trainer, behaviour: logprobs of the tokens under the trainer's present policy (pi), and under the policy that sampled them (mu).
            All logprobs of a record are at one temperature.
        reference: logprobs under the KL reference; None: the loss has no KL term.
        proximal: logprobs under the trainer's policy at the step's beginning (pi_prox); None: trainer without its gradient, which is exact
            in a step's first update.
        advantages: advantage of each token's trajectory or turn; for the algorithm distill, log(teacher / mu) of the token.
        sequences: number of each token's segment within the micro-batch, int64, from 0. All generated tokens of a segment are here.
        lengths: number of generated tokens of each token's trajectory, including those in other micro-batches.
        entropies: entropy under pi of the full softmax from which each token was drawn; None: the loss has no entropy bonus.
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
        """Return the tokens selected by keep, bool [T]."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: value[keep] for name, value in values.items() if value is not None})

    def fixed(self, config: LossConfig) -> Tensor:
        """Return the logprobs [T], without gradient, that the correction compares with those of the behaviour policy mu.

        They are the logprobs under pi_prox, or under pi in the behaviour form.
        """
        return self.trainer.detach() if self.proximal is None or not config.is_proximal else self.proximal


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the tokens of micro-batches; + adds those of further micro-batches.

    Attributes:
        num_tokens: number of all tokens.
        num_counted: number of tokens that count, because the correction did not leave them out.
        num_sequences: number of trajectories, each weighted by its share of tokens that count.
        denominator: divisor of the update's gradient, which the rule's normaliser defines.
        loss: the differentiated loss, not yet divided by the denominator.
        ratio: sum of the ratio c = pi_prox / mu (behaviour form: pi / mu) of each token, before any bound.
        ratio_squared: sum of c^2.
        ratio_max: maximum of c.
        clipped: number of tokens that the algorithm's clip bounded.
        truncated: number of tokens whose weight the correction lowered.
        gap: sum of |log c|.
        entropy, behaviour_kl, teacher_kl, update_kl: sums for the metrics of these names (`metrics`).
        reference_kl: sum for the metric `kl`.
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
    teacher_kl: float = 0.0
    update_kl: float = 0.0
    reference_kl: float = 0.0
    ratio_max: float = 0.0

    def __add__(self, other: "LossSums") -> "LossSums":
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return LossSums(**{**sums, "ratio_max": max(self.ratio_max, other.ratio_max)})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all summed tokens, by the names used in a version's manifest.

        mu is the policy that sampled a token, pi_prox the trainer's at the step's beginning, pi the trainer's present one, and
        c = pi_prox / mu before any bound. In the behaviour form, and for cispo, pi takes the place of pi_prox. With one update a
        step the two are equal. k1 and k3 are estimators of `kl`.

        - ratio_mean, ratio_max: mean and maximum of c.
        - ess: effective sample size as a share of the T tokens, (sum c)^2 / (T sum c^2).
        - logprob_gap: mean of |log c|.
        - behaviour_kl: KL(mu || pi_prox) by k3.
        - teacher_kl: KL(pi_prox || teacher) by k1, for the algorithm distill.
        - update_kl: KL(pi_prox || pi) by k3, at tokens that mu sampled.
        - clip_fraction: share of tokens that the algorithm's clip bounded. The clip acts on pi / pi_prox, so this is 0 in a step's
          first update; in the behaviour form and for cispo it acts on pi / mu.
        - truncated_fraction: share of tokens whose weight the correction lowered, because of their c.
        - masked_fraction: share of tokens that the correction left out, because of their c.
        - loss: the differentiated loss divided by the denominator.
        - entropy: mean entropy of the full softmax if the job has an entropy bonus, else the mean of -log pi at the sampled tokens.
        - kl: KL(pi || reference) by the job's estimator, at tokens that mu sampled; the mean of log(mu / reference) if the KL is
          part of the reward.
        - tokens: number of all tokens.
        - sequences: number of trajectories, each weighted by its share of tokens that count.
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
            "teacher_kl": self.teacher_kl,
            "update_kl": self.update_kl,
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
    """The objective that training maximises, for each token.

    Attributes:
        value: the objective [T], with gradient.
        clipped: whether the algorithm's clip bounded the token's ratio, bool [T].
        truncated: whether the correction's cap lowered the token's weight, bool [T].
    """

    value: Tensor
    clipped: Tensor
    truncated: Tensor


def policy_loss(record: TokenRecord, config: LossConfig) -> tuple[Tensor, LossSums]:
    """Return the loss summed over the record's tokens (a scalar with gradient), and the sums for metrics and normalisation."""
    if config.rule.advantage == "teacher":
        record = replace(record, advantages=record.advantages - (record.fixed(config) - record.behaviour))
    keep = kept(record, config)
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


def kept(record: TokenRecord, config: LossConfig) -> Tensor | None:
    """Return which tokens count, because the correction leaves them in the loss, bool [T]; None if all do.

    If the rule's ratio is of a sequence, all tokens of a segment count or none does, by the geometric mean of their ratios: without some of
    its tokens a segment would have another ratio. `masked-sequence` decides by the product of the ratios instead, for every rule.
    """
    away = record.fixed(config) - record.behaviour
    if config.rule.ratio == "sequence" and config.correction.type != "masked-sequence":
        away = means_of(away, record.sequences)
    return counted(away, record.sequences, config.correction)


def surrogate(record: TokenRecord, config: LossConfig) -> Surrogate:
    """Return the rule's surrogate of every token, times the token's importance weight. record: only tokens that count."""
    if config.is_likelihood:
        none = torch.zeros_like(record.trainer, dtype=torch.bool)
        return Surrogate(record.trainer * record.advantages, none, none)
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
    if not config.is_proximal:  # the ratio is already the weight; scale it down to the cap
        weight = torch.where(truncated, bounded(mismatch, config.correction) / mismatch, torch.ones_like(mismatch))
    free = ratio * record.advantages
    held = free if config.rule.surrogate == "weighted" else clipped * record.advantages
    return Surrogate(weight * torch.minimum(free, held), held < free, truncated)


def kl_weights(record: TokenRecord, config: LossConfig) -> Tensor:
    """Return the importance weight of each token's KL [T], without gradient.

    The weight is per token, even if the rule's ratio is of a sequence.
    """
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
    proximal = record.fixed(config).double()
    ratio = exp(proximal - behaviour)
    reference = trainer if record.reference is None else record.reference.double()
    per_token = (
        ratio,
        ratio**2,
        found.clipped.double(),
        found.truncated.double(),
        (proximal - behaviour).abs(),
        -trainer if record.entropies is None else record.entropies.double(),
        kl_estimate("k3", behaviour, proximal),
        -record.advantages.double() if config.rule.advantage == "teacher" else torch.zeros_like(trainer),
        kl_estimate("k3", proximal, trainer),
        kl_estimate(config.kl_estimator, trainer, reference),
    )
    biggest = ratio.max() if len(ratio) else ratio.sum()
    shares = (1.0 / left.lengths.double()).sum()
    totals = torch.stack([shares, total.double(), *(each.sum() for each in per_token), biggest])
    num_sequences, *sums = totals.tolist()
    counts = len(ratio), len(left.trainer)
    return LossSums(*counts, num_sequences, _denominator(config, counts[1], num_sequences), *sums)

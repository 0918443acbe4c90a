r"""The policy loss of one micro-batch: a pure function of a record of generated tokens, summed and not yet normalised.

Per token, with `lp` the trainer logprob, `mu` the behaviour logprob, `sg` stop-gradient, A the advantage:

    L = - w * min(u * A, clip(u, 1 - low, 1 + high) * A)  +  kl * w * u * k3
    u = exp(lp - prox)                  ratio to the *proximal* policy: has the gradient, and alone is clipped
    w = min(exp(sg(prox - mu)), cap)    weight of the proximal policy to the behaviour policy: no gradient, truncated
    k3 = exp(ref - lp) - (ref - lp) - 1

This is the decoupled PPO objective (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.2) with the asymmetric clip of
DAPO (arXiv 2503.14476, section 3.1) and the weight truncated (IMPALA, arXiv 1802.01561; as correction of the mismatch between sampler and
trainer: https://fengyao.notion.site/off-policy-rl). u * w is at most counted once: their product is pi / mu wherever nothing is cut.
The correction only says which policy is proximal:

    none        prox = mu, hence w = 1 and u = pi / mu: plain PPO against the behaviour policy.
    truncated   prox = sg(lp), the trainer's own policy at the step's fixed parameters, hence u = 1 in value and w = min(pi / mu, cap).
                A batch gets exactly one optimizer step, so u never leaves 1 and *the clip never binds*: what bounds an update is
                the cap, and the gradient is that of the importance-weighted policy gradient, w * A * grad(lp).

The KL term is the reverse KL to a reference policy, per token. Differentiating k3 alone would follow the forward KL; times the ratio u,
*with its gradient*, it is unbiased: grad(u * k3) = u * (lp - ref) * grad(lp) (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; verl#2953).
That right-hand side is what is computed: the left one subtracts two large numbers where the policies lie far apart.

Normalisation is over all generated tokens of the *step* (DAPO, section 3.3) and is the caller's: divide at the end by the sum of
`num_tokens`. No statistic here spans the batch, so the gradient of a step is the plain sum over its tokens however they are cut.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio before exp: beyond it a token is hopeless, and inf times a gradient of zero would be NaN."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Bounds and weights of the loss; see the formulas above. `cap` matters to `truncated` alone, the clip to `none` alone."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: Literal["truncated", "none"] = "truncated"
    cap: float = 2.0
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Generated tokens, in any order; all [T]. trainer carries the gradient.

    trainer, behaviour, reference: logprobs of the tokens under the three policies at one temperature. advantages: of each token's trajectory.
    """

    trainer: Tensor
    behaviour: Tensor
    advantages: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over tokens, to be added up over a step's micro-batches; `ratio` is pi / mu, untruncated. ratio_max is a maximum."""

    num_tokens: int = 0
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
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return LossSums(**{**sums, "ratio_max": max(self.ratio_max, other.ratio_max)})

    def metrics(self) -> dict[str, float]:
        """Means over the tokens, by the names under which a manifest carries them.

        entropy: estimated by -mean(lp) at the sampled tokens. logprob_gap: mean |lp - mu|. ess: effective sample size as a share of the tokens, (sum r)^2 /
        (T * sum r^2). behaviour_kl: KL(mu || pi) by k3. kl: KL(pi || ref) by k3, over tokens of the behaviour policy.
        """
        count = max(self.num_tokens, 1)
        means = {
            "loss": self.loss,
            "ratio_mean": self.ratio,
            "clip_fraction": self.clipped,
            "truncated_fraction": self.truncated,
            "logprob_gap": self.gap,
            "entropy": self.surprise,
            "behaviour_kl": self.behaviour_kl,
            "kl": self.reference_kl,
        }
        ess = self.ratio**2 / (count * self.ratio_squared) if self.ratio_squared else 0.0
        return {name: value / count for name, value in means.items()} | {
            "ratio_max": self.ratio_max,
            "ess": ess,
            "tokens": float(self.num_tokens),
        }


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What the formulas above are made of, per token [T]. ratio carries the gradient; the booleans say where something was cut."""

    surrogate: Tensor
    ratio: Tensor
    weight: Tensor
    clipped: Tensor
    truncated: Tensor


def policy_loss(record: TokenRecord, config: LossConfig) -> tuple[Tensor, LossSums]:
    """Return the loss summed over the record's tokens (a scalar with gradient), and its sums."""
    proximal = record.behaviour if config.correction == "none" else record.trainer.detach()
    terms = decoupled_terms(record, proximal, config)
    total = -(terms.weight * terms.surrogate).sum()
    if record.reference is not None:
        kl = reverse_kl(record.trainer, record.reference, terms.ratio)
        total = total + config.kl_coefficient * (terms.weight * kl).sum()
    return total, _sums(record, terms, total)


def decoupled_terms(record: TokenRecord, proximal: Tensor, config: LossConfig) -> TokenTerms:
    """The terms of every token for any proximal policy, given by its logprobs [T] without gradient."""
    ratio = _exp(record.trainer - proximal)
    unclipped = ratio * record.advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * record.advantages
    free = _exp(proximal - record.behaviour)
    weight = free.clamp(max=config.cap)
    return TokenTerms(torch.minimum(unclipped, clipped), ratio, weight, clipped < unclipped, free > config.cap)


def reverse_kl(logprobs: Tensor, reference: Tensor, ratio: Tensor) -> Tensor:
    """KL(pi || ref) per token [T]: ratio * k3 in value, ratio * (lp - ref) * grad(lp) in gradient. `ratio` carries its gradient."""
    value = ratio.detach() * k3_estimate(logprobs.detach(), reference)
    return value + (logprobs.detach() - reference) * (ratio - ratio.detach())


def k3_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 (http://joschu.net/blog/kl-approx.html): unbiased for KL(pi || ref) over samples of pi, never negative; [T] to [T]."""
    gap = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return gap.exp() - gap - 1.0


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@torch.no_grad()
def _sums(record: TokenRecord, terms: TokenTerms, total: Tensor) -> LossSums:
    trainer, behaviour = record.trainer.double(), record.behaviour.double()
    ratio = _exp(trainer - behaviour)
    reference = trainer if record.reference is None else record.reference.double()
    per_token = (
        ratio,
        ratio**2,
        terms.clipped.double(),
        terms.truncated.double(),
        (trainer - behaviour).abs(),
        -trainer,
        k3_estimate(behaviour, trainer),
        k3_estimate(trainer, reference),
    )
    biggest = ratio.max() if len(ratio) else ratio.sum()
    sums = torch.stack([total.double(), *(values.sum() for values in per_token), biggest])
    return LossSums(len(ratio), *sums.tolist())

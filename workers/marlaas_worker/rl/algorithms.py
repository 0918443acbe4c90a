r"""Table of the algorithms: how advantages are computed, whether a ratio is of a token or a sequence, its bounds, and the normaliser.

Three policies take part (docs/reference/algorithms.md, "Two ratios"). mu is the behaviour policy: it sampled the tokens, and the engine recorded its
logprobs. pi_prox is the trainer's policy at the first version of the step. pi is the policy under the gradient. The papers write pi_old for both mu
and pi_prox. The ratios of these policies are

    rho = pi / pi_prox      how far this step has moved; a trust region bounds it
    c   = pi_prox / mu      staleness and the mismatch of trainer and engine; an importance weight corrects it
    r   = pi / mu = rho c

`training.ratio: proximal` clips rho and weights by c (the decoupled objective: arXiv 2110.00641; arXiv 2505.24298):

    w(c) min(rho A, clip(rho) A)          w: `corrections`

`training.ratio: behaviour` is the papers' off-policy form, min(r A, clip(r) A). In a step's first update pi_prox is pi without its gradient: rho is 1
in value, the clip does not bind it, and c equals r in value. With one update a step the proximal form is thus the policy gradient with the weight
w(c). The formulas below write "ratio" for rho or r, by the job's form, and leave w out. In float32 at maxStaleness 0, c is 1 but for rounding, and
both forms give the same step.

A trajectory is one agent's part of an episode: the papers' reply o_i. |o| counts its generated tokens, A is its advantage, G episodes share a task,
and a mean over trajectories runs over the whole step. A *segment* is the part of a trajectory that the model processed as one context. A trajectory
is one segment unless its conversation branches or its chat template rewrites its past. Weights and denominators are per trajectory, so that an
episode's weight does not depend on the number of its segments. A sequence ratio is per segment: it is the likelihood ratio of tokens given one
context. A segment is never split between micro-batches, but a trajectory may be. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from marlaas_worker.rl.advantages import Estimator

Ratio = Literal["proximal", "behaviour"]
Algorithm = Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo", "sft", "distill"]
Correction = Literal["truncated", "masked-token", "masked-sequence", "icepop", "none"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: an algorithm, with the bounds that its paper gives.

    Attributes:
        advantage: the estimator that turns rewards into advantages; teacher: each token has an advantage from a teacher's logprob, and no rewards are
            compared.
        over: whether the estimator compares the rewards of a group or of a step.
        ratio: token: one for each token; sequence: the geometric mean over a segment's tokens. The correction's weight is taken over the same unit.
        surrogate: clipped, min(ratio A, clip(ratio) A), gives no gradient to a token whose ratio has passed the bound; capped, sg(clip(r)) A log pi,
            bounds a token's weight and keeps the gradient of every token; weighted, ratio A, does neither; likelihood, A log pi, has no ratio,
            because the tokens were not sampled.
        normaliser: the mean taken. token: over all tokens of the step. sequence: over trajectories, of the mean over their tokens. budget: over
            trajectories, of the sum over their tokens divided by rollout.maxTokens. sum: over trajectories, of the sum over their tokens.
        clip: default (low, high), which bound the ratio to [1 - low, 1 + high]; the job may override them.
        correction: default correction, which the job may override.
    """

    advantage: Estimator | Literal["teacher"]
    over: Literal["group", "step"]
    ratio: Literal["token", "sequence"]
    surrogate: Literal["clipped", "capped", "weighted", "likelihood"]
    normaliser: Literal["token", "sequence", "budget", "sum"]
    clip: tuple[float, float] = (0.2, 0.2)
    correction: Correction = "truncated"


GRPO = Rule("standardised", "group", "token", "clipped", "sequence")
"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1, equation 3).

    J = mean_i 1/|o_i| sum_t min(ratio_t A_i, clip(ratio_t, 1 - e, 1 + e) A_i),    A_i = (R_i - mean_G R) / deviation_G R

Delta: its KL term is differentiated as in `kl`, not as k3 alone."""

DR_GRPO = Rule("centred", "group", "token", "clipped", "budget")
"""GRPO done right (arXiv 2503.20783, section 3.2): without the division by the deviation, which favours very easy and very hard tasks, and without
1/|o|, which favours long wrong answers.

    J = mean_i 1/L sum_t min(ratio_t A_i, clip(ratio_t, 1 - e, 1 + e) A_i),    A_i = R_i - mean_G R,    L = rollout.maxTokens, a constant"""

DAPO = Rule("standardised", "group", "token", "clipped", "token", (0.2, 0.28))
"""Decoupled clip and dynamic sampling (arXiv 2503.14476, section 3): a separate upper bound, so that rare tokens can become more probable (3.1);
groups without variance are replaced (3.2; the job's maxRefill, for every algorithm); equal weight for each token (3.3). The default algorithm.

    J = 1/(sum_i |o_i|) sum_i sum_t min(ratio_t A_i, clip(ratio_t, 1 - low, 1 + high) A_i),    A_i as in GRPO

Deltas: the paper's penalty for overlong replies and its filter (section 3.4) are `training.overlong`, for every algorithm, and off by default, as in
TRL: where maxTokens is just enough for a job's answers, long answers must not be punished. The penalty depends on a trajectory's longest turn. The
orchestrator chooses the groups to replace by the rewards without the penalty."""

GSPO = Rule("standardised", "group", "sequence", "clipped", "sequence", (3e-4, 4e-4))
"""Group sequence policy optimisation (arXiv 2507.18071, section 4.1, equations 5 to 7; bounds from section 5.1).

    J = mean_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i),    s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|) = exp(1/|o_i| sum_t log ratio_t)

Every token of a sequence has the ratio s_i, and the mean over its tokens is s_i again, so this is GRPO with another ratio. The correction's weight is
a geometric mean as well, w((pi_prox(o_i) / mu(o_i))^(1/|o_i|)): the paper argues that the unit of the correction must be the unit of the reward.
Delta: the formula's reply is a segment, see above; a trajectory of several segments has one s for each, weighted by the segment's share of the
tokens."""

RLOO = Rule("leave-one-out", "group", "token", "weighted", "sum")
"""REINFORCE leave-one-out (arXiv 2402.14740, section 2.3): the plain policy gradient of the whole reply, with the mean of the other rewards as
baseline.

    J = mean_i sum_t ratio_t A_i,    A_i = R_i - mean of the other G - 1 rewards

Delta: the paper is on-policy; here the importance weight is truncated to the correction's cap. With one update a step, both forms are equal except
under `correction: none`, which leaves r unbounded in the behaviour form and applies no weight in the proximal form."""

REINFORCE_PP = Rule("standardised", "step", "token", "clipped", "sequence")
"""REINFORCE++ (arXiv 2501.03262, section 3.1): GRPO with the mean and deviation of the whole batch instead of a task's.

    J = mean_i 1/|o_i| sum_t min(ratio_t A_i, clip(ratio_t, 1 - e, 1 + e) A_i),    A_i = (R_i - mean_step R) / deviation_step R

The statistics span the batch, so backward can begin only when the step is complete, and strict mode rejects this algorithm. Deltas: the paper's KL in
the reward is `kl.addedTo: reward`, off by default, and lowers the reward of the whole reply; groups without variance are replaced, although they
would have an advantage here."""

CISPO = Rule("standardised", "group", "token", "capped", "token", (1.0, 4.0), correction="none")
"""Clipped importance-sampling weight policy optimisation (MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5): the weight is bounded, and
every token keeps its gradient.

    J = 1/(sum_i |o_i|) sum_i sum_t sg(clip(r_t, 1 - low, 1 + high)) A_i log pi_t,    A_i as in GRPO

Its ratio is r = pi / mu in both forms. In the paper sg(clip(r)) is not a trust region but the importance weight against the policy that sampled, and
the clip bounds that weight's variance. Clipping rho instead would bound a factor that is 1, and leave the weight itself to the correction. So the
clip acts as the correction, and `correction` is none by default; a correction that the job chooses is applied in addition.

The paper leaves the weight unbounded below (low = 1 here) and does not state its upper bound. 1 + high = 5 is in the range in which ScaleRL found no
difference (arXiv 2510.13786, section 3.2: 4 to 8)."""

SFT = Rule("none", "group", "token", "likelihood", "token", correction="none")
"""Supervised fine-tuning on demonstrations: the mean log-likelihood of the replies' tokens, their end tokens included.

    J = 1/(sum_i |o_i|) sum_i sum_t log pi_t

Every token of a step has the same weight, as in the usual cross-entropy loss over a batch whose prompts are masked (for example trl's
`assistant_only_loss`). A demonstration is a group of one. Its probability is that at temperature 1, whatever `rollout.temperature` is."""

DISTILL = Rule("teacher", "group", "token", "clipped", "token")
"""On-policy distillation (Thinking Machines 2025, https://thinkingmachines.ai/blog/on-policy-distillation/; GKD with reverse KL and student data,
arXiv 2306.13649, section 3.1): the student samples, and the teacher grades each token.

    J = 1/(sum_i |o_i|) sum_i sum_t min(ratio_t A_t, clip(ratio_t, 1 - e, 1 + e) A_t),    A_t = log pi_T(o_t) - log pi_prox(o_t)

pi_T is the teacher's distribution after the same tokens; teacher and student have temperature 1. The mean of -A over tokens of the student is the
reverse KL divergence KL(pi || pi_T) of the next token, and the policy gradient with A is the exact negative gradient of that divergence, because the
derivative of A itself has the mean zero. A token is not credited with the divergence of later tokens (a discount of 0, as in the source). GKD
differentiates the sum over the vocabulary instead, which has the same mean and less variance, and needs all logits of the teacher.

Delta to the source: its A has the sampling policy mu instead of pi_prox. On-policy, they are equal. With stale tokens, the importance weight
pi_prox/mu and this A still give the gradient of KL(pi_prox || pi_T), which vanishes when the student equals the teacher; with mu in A it would not.
In the form `behaviour`, pi without its gradient stands for pi_prox. Rewards are not used."""

ALGORITHMS: Mapping[Algorithm, Rule] = {
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "reinforce++": REINFORCE_PP,
    "cispo": CISPO,
    "sft": SFT,
    "distill": DISTILL,
}

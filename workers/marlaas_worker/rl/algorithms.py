r"""The algorithms, as one table: what is compared to get an advantage, at which level a ratio is taken, how it is bounded, what is divided by.

Everywhere below r = pi / mu: the trained policy over the *behaviour* policy, the one that sampled and recorded the tokens. The papers write pi_old, and
mean the policy that sampled the batch; a batch here gets exactly one optimizer step, so no third policy comes in between. Two things move r away from 1,
staleness and the difference between sampler and trainer. At maxStaleness 0 it is rounding alone: there no clip ever binds, and algorithms that differ
by their clip alone give the same step.

A sequence is a *segment*: the turns that a model saw as one context. A trajectory is one segment unless its conversation branches or its chat template
rewrites its past. A segment is never cut between micro-batches. |o| counts a sequence's generated tokens, A is its trajectory's advantage, G episodes
share a task, and a mean over sequences runs over the whole step. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from marlaas_worker.rl.advantages import Estimator

Algorithm = Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo"]
Correction = Literal["truncated", "masked-token", "masked-sequence", "icepop", "none"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table, and the bounds that its paper gives.

    advantage, over: how rewards become advantages, and over which of them. ratio: of a token, or the geometric mean over a sequence's tokens.

    surrogate: clipped, min(r A, clip(r) A), lets go of a token whose ratio has gone far enough; capped, sg(clip(r)) A log pi, bounds its weight and never
    lets go; weighted, r A, does neither.

    normaliser: what is averaged. token: over all tokens of the step. sequence: over sequences, of the mean over their tokens. budget: over sequences, of
    the sum over their tokens divided by rollout.maxTokens. sum: over sequences, of the sum over their tokens.

    clip: (low, high) bound r to [1 - low, 1 + high]. overlong: share of maxTokens over which DAPO's penalty falls. correction: unless the job chooses.
    """

    advantage: Estimator
    over: Literal["group", "step"]
    ratio: Literal["token", "sequence"]
    surrogate: Literal["clipped", "capped", "weighted"]
    normaliser: Literal["token", "sequence", "budget", "sum"]
    clip: tuple[float, float] = (0.2, 0.2)
    overlong: float = 0.0
    correction: Correction = "truncated"


GRPO = Rule("standardised", "group", "token", "clipped", "sequence")
"""Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1, equation 3).

    J = mean_i 1/|o_i| sum_t min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i),    A_i = (R_i - mean_G R) / deviation_G R

Delta: its KL term is differentiated as in `kl`, not as k3 alone."""

DR_GRPO = Rule("centred", "group", "token", "clipped", "budget")
"""GRPO done right (arXiv 2503.20783, section 3.2): neither the deviation, which favours very easy and very hard tasks, nor 1/|o|, which favours long
wrong answers.

    J = mean_i 1/L sum_t min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i),    A_i = R_i - mean_G R,    L = rollout.maxTokens, a constant"""

DAPO = Rule("standardised", "group", "token", "clipped", "token", (0.2, 0.28), overlong=0.2)
"""Decoupled clip and dynamic sampling (arXiv 2503.14476, section 3): an upper bound of its own, so that rare tokens can rise (3.1); groups without
variance are drawn anew (3.2; the job's maxRefill, for every algorithm); each token weighs alike (3.3); a penalty for overlong replies (3.4).

    J = 1/(sum_i |o_i|) sum_i sum_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i),    A_i as in GRPO, of R + overlong_penalty

Deltas: the penalty looks at a trajectory's longest turn; the orchestrator, which draws groups anew, sees rewards without it."""

GSPO = Rule("standardised", "group", "sequence", "clipped", "sequence", (3e-4, 4e-4))
"""Group sequence policy optimisation (arXiv 2507.18071, section 4.1, equations 5 to 7; bounds from section 5.1).

    J = mean_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i),    s_i = (pi(o_i) / mu(o_i))^(1/|o_i|) = exp(1/|o_i| sum_t log r_t)

Every token of a sequence carries s_i, and the mean over them is s_i again: so it is GRPO with another ratio."""

RLOO = Rule("leave-one-out", "group", "token", "weighted", "sum")
"""REINFORCE leave-one-out (arXiv 2402.14740, section 2.3): the plain policy gradient of the whole reply, with the best unbiased baseline at hand.

    J = mean_i sum_t r_t A_i,    A_i = R_i - mean of the other G - 1 rewards

Delta: the paper is on-policy; here a token is weighted by r, and only the job's correction bounds that weight."""

REINFORCE_PP = Rule("standardised", "step", "token", "clipped", "sequence")
"""REINFORCE++ (arXiv 2501.03262, section 3.1): GRPO whose mean and deviation are those of the whole batch, not of a task.

    J = mean_i 1/|o_i| sum_t min(r_t A_i, clip(r_t, 1 - e, 1 + e) A_i),    A_i = (R_i - mean_step R) / deviation_step R

A statistic spans the batch, so backward can begin only when the step is complete, and strict mode refuses it. Deltas: KL is a term of the loss, as for
all, not of the reward; groups without variance are drawn anew although they would have an advantage here."""

CISPO = Rule("standardised", "group", "token", "capped", "token", (1.0, 4.0), correction="none")
"""Clipped importance-sampling weight policy optimisation (MiniMax-M1, arXiv 2506.13585, section 3.1, equations 4 and 5): the weight is bounded, and no
token is let go of.

    J = 1/(sum_i |o_i|) sum_i sum_t sg(clip(r_t, 1 - low, 1 + high)) A_i log pi_t,    A_i as in GRPO

The paper leaves the weight unbounded below (low = 1 here) and does not state its upper bound; 1 + high = 5 is within what ScaleRL found to make no
difference (arXiv 2510.13786, section 3.2: 4 to 8)."""

ALGORITHMS: Mapping[Algorithm, Rule] = {
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "reinforce++": REINFORCE_PP,
    "cispo": CISPO,
}

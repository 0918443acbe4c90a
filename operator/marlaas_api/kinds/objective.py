"""The terms of the loss: the clip, the correction, KL, entropy, and the treatment of overlong replies."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import DnsLabel, PathText, Spec, rules

_FLOOR_IS_ICEPOPS = "floor needs type: icepop, the only correction with a lower bound; remove floor, or choose icepop"
_ONE_REFERENCE = "path and versionsBehind name two different references: remove one of them"
_REWARD_IS_K1 = "addedTo: reward needs estimator k1, the only one with the right gradient in the reward; remove estimator, or choose addedTo: loss"


class BaselineSpec(Spec):
    """Baseline of the advantage: the rewards with which an episode's reward is compared."""

    type: Literal["group", "running-mean"] = Field(
        "group",
        description="group: the rewards of the group (reinforce++: of the step), as the algorithm defines. running-mean: a running mean of the agent's own rewards over "
        "steps, for self-play and for groups of one episode (docs/reference/algorithms.md, Baseline).",
    )
    decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="running-mean: weight of the mean so far when a step's mean reward is added. 0: the mean of the step before.",
    )


class CreditSpec(Spec):
    """How the reward of an episode is credited to its turns."""

    type: Literal["episode", "turn", "state"] = Field(
        "episode",
        description="episode: every turn has the episode's advantage, and rewards of turns are part of the episode's reward. turn: a turn has the advantage "
        "of its discounted return, compared with the returns of the group's turns of the same number. state: the episode's advantage plus weight "
        "times that of the turn's return among the group's turns in the same state, which is what the environment has shown right before (GiGPO).",
    )
    discount: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Factor for each further turn of the agent between a turn and a later reward (gamma), for turn and state.",
    )
    weight: float = Field(1.0, ge=0, le=1000, description="Weight of the advantage among equal states, for state.")


class ClipSpec(Spec):
    """Clip bounds of the ratio that `ratio` selects: [1 - low, 1 + high]. With ratio: proximal and one update a step they affect only cispo. rloo has no clip.

    Defaults are those of each algorithm's paper: 0.2 and 0.2 for grpo, dr-grpo and reinforce++, 0.2 and 0.28 for dapo, 0.0003 and 0.0004 for gspo,
    no lower bound and 4 for cispo.
    """

    low: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Lower clip bound: the ratio is clipped at 1 - low. Absent: the algorithm's default.",
    )
    high: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Upper clip bound: the ratio is clipped at 1 + high. For cispo, 1 + high is the maximum weight of a token. Absent: the algorithm's "
        "default.",
    )


class KlReference(Spec):
    """The reference policy of the KL penalty: version 0, a frozen adapter, or a past version. Empty: version 0."""

    model_config = ConfigDict(json_schema_extra=rules(("!has(self.path) || !has(self.versionsBehind)", _ONE_REFERENCE)))
    path: PathText | None = Field(
        None,
        description="Adapter in PEFT format, in a folder that the pool's workers can read, with the agent's rank and alpha. It is read once, when training "
        "begins, and stored with the job. Absent: version 0.",
    )
    versions_behind: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Moving reference: the version this many versions before the trained one, or version 0 while there are fewer. Absent: a fixed reference.",
    )

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if self.path is not None and self.versions_behind is not None:
            raise ValueError(_ONE_REFERENCE)
        return self


class KlSpec(Spec):
    """Penalty for the divergence of the policy from a reference policy, by default version 0."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.addedTo) || self.addedTo != 'reward' || !has(self.estimator) || self.estimator == 'k1'",
                _REWARD_IS_K1,
            ),
        )
    )
    coefficient: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Weight of the KL penalty; 0 disables it and saves the forward pass of the reference.",
    )
    added_to: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the penalty is applied. loss: as a term for each token. reward: it is subtracted from the episode's reward before advantages are "
        "computed (PPO for RLHF, RLOO, REINFORCE++). The penalty is coefficient times the sum of log(sampler/reference) over the episode's tokens. "
        "Rewards in status and records, and the replacement of groups without signal, do not include it.",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="Estimator of the KL divergence at a token, with l = log(policy/reference): k1 is l, k2 is l^2/2, k3 is exp(-l) - 1 + l. In the loss all "
        "three have an unbiased gradient; k2 and k3 have the same one, k1's is noisier. Absent: k3 in the loss; k1 in the reward, where no other is "
        "allowed.",
    )
    reference: KlReference = Field(
        default_factory=lambda: KlReference(),
        description="The reference policy of the KL penalty: version 0, a frozen adapter, or a past version.",
    )

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        if self.added_to == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(_REWARD_IS_K1)
        return self


class CorrectionSpec(Spec):
    """Importance-sampling correction: bounds on each token's ratio trainer/sampler.

    It corrects for staleness and for numerical differences between trainer and engine.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.floor) || (has(self.type) && self.type == 'icepop')", _FLOOR_IS_ICEPOPS),
        )
    )
    type: Literal["truncated", "masked-token", "masked-sequence", "icepop", "none"] | None = Field(
        None,
        description="Type of bound. With ratio: proximal, tokens are weighted by trainer/sampler. truncated: weights are at most cap. masked-token: tokens "
        "above cap are left out. masked-sequence: segments whose product of ratios exceeds cap are left out. icepop: tokens outside the range floor to cap "
        "are left out. none: no bound, and with ratio: proximal no weight. Absent: truncated, except for cispo: none, because its clip already bounds "
        "weights.",
    )
    cap: float | None = Field(
        None,
        ge=1,
        le=1000,
        description="Maximum ratio. Absent: 2 for truncated, 3 for masked-token and masked-sequence, 5 for icepop.",
    )
    floor: float | None = Field(None, gt=0, le=1, description="Minimum ratio, for icepop only. Absent: 0.5.")

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        if self.floor is not None and self.type != "icepop":
            raise ValueError(_FLOOR_IS_ICEPOPS)
        return self


class DistillationSpec(Spec):
    """Where the advantages of the algorithm distill come from."""

    teacher: DnsLabel = Field(
        description="Name of the agent that scores every token that the trainable agents sample. It is an agent of the job with trainable: false, on a "
        "pool whose model has the same vocabulary. Environments do not see it.",
    )


class OverlongSpec(Spec):
    """Treatment of overlong replies (DAPO). It affects only training: rewards in status and records do not include it."""

    tokens: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Length of the penalty range: over the last this many tokens before maxTokens, a penalty rises linearly from 0 to 1 and is subtracted "
        "from the reward; 0 disables it. DAPO's paper has a fifth of maxTokens.",
    )
    filter: bool = Field(
        False,
        description="True excludes episodes that maxTokens, maxTurns or the context window ended from the loss; their rewards still count in the advantages "
        "of the other episodes. False trains on them.",
    )


class EntropySpec(Spec):
    """Bonus for the entropy of the policy's next-token distribution."""

    coefficient: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Weight of the bonus: the entropy of the next-token distribution, in nats, at each generated token; 0 disables it. Typical values are "
        "0.001 to 0.01.",
    )

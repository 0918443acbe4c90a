"""The terms of the loss: the clip, the correction, KL, entropy, and the treatment of overlong replies."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import PathText, Spec, rules

_FLOOR_IS_ICEPOPS = (
    "floor belongs to type: icepop, the only correction with a bound below; remove floor, or choose icepop"
)
_ONE_REFERENCE = "path and versionsBehind are two references: remove one of them"
_REWARD_IS_K1 = "in the reward KL is the log ratio of the sampled tokens, which is k1: only k1 has the right gradient there; remove estimator, or choose addedTo: loss"


class ClipSpec(Spec):
    """Bounds of the ratio that `ratio` chooses: [1 - low, 1 + high]. With ratio: proximal they bind for cispo alone. rloo has none.

    Absent, they are those of the algorithm's paper: 0.2 and 0.2 for grpo, dr-grpo and reinforce++, 0.2 and 0.28 for dapo, 0.0003 and 0.0004 for gspo,
    and for cispo no bound below and 4 above.
    """

    low: float | None = Field(
        None, gt=0, lt=1, description="How far below 1 the ratio still counts. Absent: the algorithm's own."
    )
    high: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="How far above 1 the ratio still counts; cispo lets a token weigh at most 1 + high. Absent: the algorithm's own.",
    )


class KlReference(Spec):
    """The policy that the KL penalty pulls towards. Empty: version 0."""

    model_config = ConfigDict(json_schema_extra=rules(("!has(self.path) || !has(self.versionsBehind)", _ONE_REFERENCE)))
    path: PathText | None = Field(
        None,
        description="PEFT folder that the pool's workers can read, of the agent's rank and alpha; read once, when training begins, and kept with the job. "
        "Absent: version 0.",
    )
    versions_behind: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="The reference is the version that many versions before the one that is trained, and version 0 until there is one. Absent: a fixed "
        "reference.",
    )

    @model_validator(mode="after")
    def _one_reference(self) -> Self:
        if self.path is not None and self.versions_behind is not None:
            raise ValueError(_ONE_REFERENCE)
        return self


class KlSpec(Spec):
    """KL penalty; the default reference is version 0."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.addedTo) || self.addedTo != 'reward' || !has(self.estimator) || self.estimator == 'k1'",
                _REWARD_IS_K1,
            ),
        )
    )
    coefficient: float = Field(
        0.0, ge=0, le=1000, description="Weight of the KL penalty; 0 leaves it, and its extra forward pass, out."
    )
    added_to: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: a term for each token. reward: an episode's reward falls by coefficient times the sum of log(sampler/reference) over its tokens, "
        "before rewards are compared (PPO for RLHF, RLOO, REINFORCE++). Rewards in status and records, and the choice of groups to draw anew, are without it.",
    )
    estimator: Literal["k1", "k2", "k3"] | None = Field(
        None,
        description="How KL is estimated at a token, with l = log(policy/reference): k1 is l, k2 l^2/2, k3 exp(-l) - 1 + l. In the loss all three have a "
        "gradient that is right on average; k1's is noisier, k2 and k3 have the same. Absent: k3 in the loss; k1 in the reward, which takes no other.",
    )
    reference: KlReference = Field(
        default_factory=lambda: KlReference(),
        description="The policy that the penalty pulls towards: version 0, a frozen adapter, or a past version.",
    )

    @model_validator(mode="after")
    def _estimator_fits(self) -> Self:
        if self.added_to == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(_REWARD_IS_K1)
        return self


class CorrectionSpec(Spec):
    """Bounds of a token's ratio trainer/sampler, against staleness and numerical differences between trainer and sampler."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.floor) || (has(self.type) && self.type == 'icepop')", _FLOOR_IS_ICEPOPS),
        )
    )
    type: Literal["truncated", "masked-token", "masked-sequence", "icepop", "none"] | None = Field(
        None,
        description="With ratio: proximal tokens are weighted by trainer/sampler. truncated: no token weighs more than cap. masked-token: tokens above cap "
        "do not count. masked-sequence: segments whose tokens' ratios multiply to more than cap do not count. icepop: tokens outside floor to cap do not "
        "count. none: no bound, and with ratio: proximal no weight. Absent: none for cispo, whose clip bounds weights already; truncated for the others.",
    )
    cap: float | None = Field(
        None,
        ge=1,
        le=1000,
        description="Largest ratio. Absent: 2 if truncated, 3 if masked, 5 for icepop.",
    )
    floor: float | None = Field(None, gt=0, le=1, description="Smallest ratio, for icepop alone. Absent: 0.5.")

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        if self.floor is not None and self.type != "icepop":
            raise ValueError(_FLOOR_IS_ICEPOPS)
        return self


class OverlongSpec(Spec):
    """Treatment of overlong replies (DAPO). It affects learning alone: status and records are without it."""

    tokens: int | None = Field(
        None,
        ge=0,
        le=1_048_576,
        description="Over the last so many of maxTokens the reward falls, by 1 at the end; 0 punishes nothing. Absent: a fifth of maxTokens for dapo, 0 "
        "for the others.",
    )
    filter: bool = Field(
        False,
        description="True leaves episodes out of the loss that maxTokens, maxTurns or the context window ended; their rewards are still compared with those of "
        "the other episodes. False trains on them.",
    )


class EntropySpec(Spec):
    """Bonus for the entropy of the policy's next-token distribution."""

    coefficient: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Weight of the entropy of the next token's distribution, in nats, added for each generated token; 0 adds none. 0.001 to 0.01 is usual.",
    )

"""Training settings of a job: sampling, optimization, evaluation, checkpoints and export."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import FIXED, Distinct, PathText, Spec, refuse, rules
from marlaas_api.kinds.data import DataSpec
from marlaas_api.kinds.objective import ClipSpec, CorrectionSpec, EntropySpec, KlSpec, OverlongSpec
from marlaas_api.numeric import LARGEST_INTEGER

Tracker = Literal["tensorboard", "wandb", "mlflow"]
"""Names of the trackers' own libraries; which server, project and credentials is said to them as ever, by their environment variables."""

Trackers = Distinct[Tracker]


_SAMPLING_CONTRACT = (
    "refused: in training only what the trainer can reproduce is allowed, and that is the temperature; {key} makes the engine "
    "sample from another distribution than the one whose logprobs are trained on. Remove it"
)
_NOT_REPRODUCIBLE = (
    "topP",
    "topK",
    "minP",
    "typicalP",
    "presencePenalty",
    "frequencyPenalty",
    "repetitionPenalty",
    "minTokens",
)
_PROMOTE_NEEDS_TASKS = "promote: best chooses by evaluation, and tasks is 0: raise tasks, or promote: last"
_FLOOR_NEEDS_DECAY = "minLearningRateRatio is what schedule linear or cosine decays to, and constant does not decay: remove it, or choose another schedule"
_STRICT_SPANS_NO_BATCH = (
    "reinforce++ compares a reward with those of the whole step, and maxStaleness 0 (strict) allows no statistic that spans the batch: choose another "
    "algorithm, or maxStaleness 1 or more"
)
_RLOO_HAS_NO_CLIP = "rloo has no clip: remove clip, or choose another algorithm; correction bounds rloo's weights"
_Beta = Annotated[float, Field(ge=0, lt=1)]


class RolloutSpec(Spec):
    """Sampling. Only what the trainer can reproduce is allowed: there is a temperature, and no top-p, top-k or penalties."""

    model_config = ConfigDict(json_schema_extra=refuse)
    refused: ClassVar = {key: _SAMPLING_CONTRACT.format(key=key) for key in _NOT_REPRODUCIBLE}

    group_size: int = Field(
        8,
        ge=2,
        le=1024,
        description="Episodes per task (G); rewards are compared within them, so fewer than 2 teach nothing.",
    )
    max_turns: int = Field(
        8,
        ge=1,
        le=10_000,
        description="Turns that an agent may take in one episode; taking all of them ends it, scored.",
    )
    max_tokens: int = Field(
        256,
        ge=1,
        le=1_048_576,
        description="Tokens that one turn may generate; it must leave the pool's maxModelLen room.",
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=2,
        description="Sampling temperature, in training and evaluation; 1 samples the policy itself. Engines sample at none below 0.01.",
    )


class OptimizerSpec(Spec):
    """AdamW."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.minLearningRateRatio) || (has(self.schedule) && self.schedule != 'constant')",
                _FLOOR_NEEDS_DECAY,
            ),
        )
    )
    learning_rate: float = Field(
        1e-4, gt=0, le=10, description="Peak learning rate; LoRA takes ten times a full model's."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="The learning rate after the warm-up. constant: it stays at the peak. linear, cosine: it decays over training.steps, along a line or half "
        "a cosine. Steps without signal count. If steps is raised later, a step has the rate that it has in a job of so many steps.",
    )
    warmup_steps: int = Field(0, ge=0, le=1_000_000, description="Steps of linear warm-up; 0 begins at the peak.")
    min_learning_rate_ratio: float | None = Field(
        None, ge=0, le=1, description="What linear and cosine decay to, as a share of the peak. Absent: 0."
    )
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.999), description="AdamW's decay rates of the two moments.")
    epsilon: float = Field(
        1e-8,
        gt=0,
        le=1,
        description="Added to the root of AdamW's second moment. A larger one makes smaller steps where gradients are tiny.",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=10, description="Decoupled weight decay; 0, because adapters are small already."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=LARGEST_INTEGER, description="Gradients of a larger norm are scaled down to it."
    )

    @model_validator(mode="after")
    def _floor_has_decay(self) -> Self:
        if self.min_learning_rate_ratio is not None and self.schedule == "constant":
            raise ValueError(_FLOOR_NEEDS_DECAY)
        return self


class TrainingSpec(Spec):
    """Algorithm, loss, optimizer and data of the training."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.algorithm) || self.algorithm != 'reinforce++' || !has(self.maxStaleness) || self.maxStaleness > 0",
                _STRICT_SPANS_NO_BATCH,
            ),
            (
                "!has(self.algorithm) || self.algorithm != 'rloo' || !has(self.clip) || (!has(self.clip.low) && !has(self.clip.high))",
                _RLOO_HAS_NO_CLIP,
            ),
        )
    )
    algorithm: Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo"] = Field(
        "grpo",
        description="What is learnt from rewards; docs/algorithms.md says which when. grpo: rewards in units of their group's deviation. dr-grpo: without "
        "the deviation, and every token alike. dapo: grpo over all tokens alike, rare ones free to rise, overlong replies punished. gspo: one ratio per "
        "sequence. rloo: the plain policy gradient, each reward against the group's others. reinforce++: rewards in units of the step's deviation, not "
        "in strict mode. cispo: weights bounded, no token let go of.",
        json_schema_extra=FIXED,
    )
    steps: int = Field(
        ge=1,
        le=10_000_000,
        description="Steps to train; may be raised later.",
        json_schema_extra=rules(("self >= oldSelf", "may be raised, never lowered: finished steps cannot be undone")),
    )
    groups_per_step: int = Field(
        8, ge=1, le=4096, description="Groups in one optimizer step (P).", json_schema_extra=FIXED
    )
    microbatch_tokens: int = Field(
        4096,
        ge=16,
        le=16_777_216,
        description="Padded tokens of one forward and backward pass; bounds the trainer's memory. It changes results by rounding alone. A step for which the "
        "device's memory is too small is done anew with half of it, and so are later steps.",
        json_schema_extra=FIXED,
    )
    optimizer: OptimizerSpec = Field(
        default_factory=lambda: OptimizerSpec(), description="AdamW.", json_schema_extra=FIXED
    )
    max_staleness: int = Field(
        1,
        ge=0,
        le=16,
        description="Versions that a trained group may be behind. 0 is strict: on-policy, and with rollout.engine reference the same bits again on the "
        "same kind of CPU with as many threads (docs/models.md, Reproducibility); vLLM's sampling depends on its batch. 1 lets sampling and training "
        "overlap.",
        json_schema_extra=FIXED,
    )
    max_refill: int = Field(
        2,
        ge=0,
        le=16,
        description="How many times groupsPerStep may be drawn anew in a step to replace groups without signal.",
        json_schema_extra=FIXED,
    )
    ratio: Literal["proximal", "behaviour"] = Field(
        "proximal",
        description="Which ratio the algorithm's clip bounds. proximal: the trained policy over the trainer's at the first version of the step, which is 1 as a "
        "step is one update; correction then weights tokens by trainer/sampler. behaviour: the trained policy over the one that sampled, the papers' "
        "off-policy form, in which a clip drops tokens that staleness or rounding has moved far enough. cispo's is always that of behaviour.",
        json_schema_extra=FIXED,
    )
    clip: ClipSpec = Field(
        default_factory=lambda: ClipSpec(),
        description="Bounds of the ratio that `ratio` chooses.",
        json_schema_extra=FIXED,
    )
    kl: KlSpec = Field(
        default_factory=lambda: KlSpec(),
        description="Penalty towards a reference; none by default.",
        json_schema_extra=FIXED,
    )
    entropy: EntropySpec = Field(
        default_factory=lambda: EntropySpec(),
        description="Entropy bonus; none by default.",
        json_schema_extra=FIXED,
    )
    correction: CorrectionSpec = Field(
        default_factory=lambda: CorrectionSpec(),
        description="What is done about staleness, and about trainer and sampler not being the same function.",
        json_schema_extra=FIXED,
    )
    overlong: OverlongSpec = Field(
        default_factory=lambda: OverlongSpec(),
        description="A penalty for turns that come near maxTokens, and a filter for what a limit cut off.",
        json_schema_extra=FIXED,
    )
    data: DataSpec = Field(
        default_factory=lambda: DataSpec(), description="Which tasks, in which order.", json_schema_extra=FIXED
    )
    seed: int = Field(
        0,
        ge=0,
        le=LARGEST_INTEGER,
        description="Seed of tasks, sampling and initial weights.",
        json_schema_extra=FIXED,
    )

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        if self.algorithm == "reinforce++" and self.max_staleness == 0:
            raise ValueError(_STRICT_SPANS_NO_BATCH)
        if self.algorithm == "rloo" and (self.clip.low is not None or self.clip.high is not None):
            raise ValueError(_RLOO_HAS_NO_CLIP)
        return self


class EvaluationSpec(Spec):
    """Held-out tasks, played with the training temperature."""

    model_config = ConfigDict(
        # has(): the API server checks the rule on the default `{}` before it fills in the defaults of inner fields
        json_schema_extra=rules(
            ("!has(self.promote) || self.promote != 'best' || !has(self.tasks) || self.tasks > 0", _PROMOTE_NEEDS_TASKS)
        )
    )
    every: int = Field(
        10,
        ge=1,
        le=10_000_000,
        description="Steps between evaluations; version 0 and the last version are always evaluated.",
    )
    tasks: int = Field(
        64, ge=0, le=100_000, description="Held-out tasks; 0 evaluates never. 64 tell a mean to about 0.06."
    )
    promote: Literal["last", "best"] = Field("last", description="Which version the job publishes at its end.")

    @model_validator(mode="after")
    def _best_needs_tasks(self) -> Self:
        if self.promote == "best" and self.tasks == 0:
            raise ValueError(_PROMOTE_NEEDS_TASKS)
        return self


class CheckpointSpec(Spec):
    """Retention of older adapter versions."""

    keep: int = Field(2, ge=1, le=1000, description="Versions whose files are kept besides the promoted one.")


class ExportSpec(Spec):
    """Where the promoted adapter goes besides the blob store."""

    path: PathText | None = Field(
        None,
        description="Folder, on the machine of `marlaas run`, for a plain PEFT adapter; a cluster does not follow it. Absent: the blob store alone.",
    )
    trackers: Trackers = Field(
        (),
        max_length=3,
        description="Trackers that `marlaas run` also tells every step and evaluation: tensorboard, wandb, mlflow; a cluster does not follow it; none by default.",
    )

"""Training settings of a job: sampling, algorithm, evaluation, and checkpoints."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from marlaas_api.kinds.base import (
    FIXED,
    NO_CHANGE,
    Spec,
    list_map,
    matching,
    refuse,
    rules,
    unchanged,
)
from marlaas_api.kinds.chat_template import ChatTemplateSpec
from marlaas_api.kinds.data import DataSpec
from marlaas_api.kinds.environment import SuiteEnvironmentSpec
from marlaas_api.kinds.objective import (
    BaselineSpec,
    ClipSpec,
    CorrectionSpec,
    CreditSpec,
    DistillationSpec,
    EntropySpec,
    KlSpec,
    OverlongSpec,
)
from marlaas_api.kinds.optimizer import OptimizerSpec
from marlaas_api.names import MAX_STOP_TEXT, MAX_STOPS
from marlaas_api.numeric import LARGEST_INTEGER

SuiteName = Annotated[str, matching(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "lower-case letters, digits, - and .", 40)]
"""Name of a suite of the evaluation."""

StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_TEXT)]
_SAMPLING_CONTRACT = (
    "refused: temperature is the only sampling setting that the trainer can reproduce; {key} makes the engine sample from another "
    "distribution than the one whose logprobs are trained on. Remove it"
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
_PROMOTE_NEEDS_TASKS = "promote: best needs evaluations, but tasks is 0: raise tasks, or set promote: last"
_MAX_EPISODES = 100_000
_TOO_MANY_EPISODES = f"tasks x samples is at most {_MAX_EPISODES}: lower one of them"
_UNKNOWN_SUITE = "suite names none of suites; name one of them"
_STRICT_SPANS_NO_BATCH = (
    "reinforce++ normalises rewards over the whole step, but maxStaleness 0 (strict) allows no statistic over several groups: choose another "
    "algorithm, or maxStaleness 1 or more"
)
_BASELINE_IS_NO_BATCH = "reinforce++ compares the rewards of a step; choose baseline type group, or another algorithm"
_CREDIT_IS_NO_BATCH = "reinforce++ compares the rewards of a step; choose credit type episode, or another algorithm"
_CREDIT_NEEDS_GROUP = (
    "credit to turns needs returns that are compared within a group; choose credit type episode, or baseline type group"
)
_UNEQUAL_UPDATES = "updatesPerStep must divide groupsPerStep, so that every update trains as many groups; choose a divisor of groupsPerStep"
_RLOO_HAS_NO_CLIP = "rloo has no clip: remove clip, or choose another algorithm; use correction to bound rloo's weights"
_SFT_HAS_NO_REWARDS = (
    "sft trains demonstrations, which have no rewards and no sampling policy: remove baseline, credit, clip, kl, entropy, correction, overlong and "
    "data.skip, or choose another algorithm"
)
_SFT_RULE = (
    "!has(self.algorithm) || self.algorithm != 'sft' || ("
    "(!has(self.baseline) || !has(self.baseline.type) || self.baseline.type == 'group') "
    "&& (!has(self.credit) || !has(self.credit.type) || self.credit.type == 'episode') "
    "&& (!has(self.clip) || (!has(self.clip.low) && !has(self.clip.high))) "
    "&& (!has(self.kl) || !has(self.kl.coefficient) || self.kl.coefficient == 0.0) "
    "&& (!has(self.entropy) || !has(self.entropy.coefficient) || self.entropy.coefficient == 0.0) "
    "&& (!has(self.correction) || !has(self.correction.type)) "
    "&& (!has(self.overlong) || ((!has(self.overlong.tokens) || self.overlong.tokens == 0) && (!has(self.overlong.filter) || !self.overlong.filter))) "
    "&& (!has(self.data) || !has(self.data.skip)))"
)

_DISTIL_NEEDS_TEACHER = "algorithm distill takes its advantages from distillation.teacher, and no other algorithm does: give both, or neither"
_DISTIL_RULE = "(has(self.algorithm) && self.algorithm == 'distill') == has(self.distillation)"
_DISTIL_HAS_NO_REWARDS = (
    "distill trains every token towards the teacher, and rewards only measure it: remove baseline, credit, overlong.tokens, kl.addedTo: reward "
    "and data.skip, or choose another algorithm"
)
_DISTIL_REWARDS_RULE = (
    "!has(self.algorithm) || self.algorithm != 'distill' || ("
    "(!has(self.baseline) || !has(self.baseline.type) || self.baseline.type == 'group') "
    "&& (!has(self.credit) || !has(self.credit.type) || self.credit.type == 'episode') "
    "&& (!has(self.overlong) || !has(self.overlong.tokens) || self.overlong.tokens == 0) "
    "&& (!has(self.kl) || !has(self.kl.addedTo) || self.kl.addedTo == 'loss') "
    "&& (!has(self.data) || !has(self.data.skip)))"
)


class RolloutSpec(Spec):
    """Sampling of episodes. Temperature is the only sampling setting, because the trainer cannot reproduce top-p, top-k or penalties."""

    model_config = ConfigDict(json_schema_extra=refuse)
    refused: ClassVar = {key: _SAMPLING_CONTRACT.format(key=key) for key in _NOT_REPRODUCIBLE}

    group_size: int = Field(
        8,
        ge=1,
        le=1024,
        description="Episodes per task (G). Advantages compare rewards within the group, so at least 2 are needed; with training.baseline type running-mean, 1 is enough.",
    )
    max_turns: int = Field(
        8,
        ge=1,
        le=10_000,
        description="Maximum turns of one agent in one episode. Of parts that run at the same time, each counts only its own turns and those before it. An episode that reaches it ends and is scored.",
    )
    max_tokens: int = Field(
        256,
        ge=1,
        le=1_048_576,
        description="Maximum tokens that one turn generates; must be less than the pool's maxModelLen, which also holds the prompt.",
    )
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=2,
        description="Sampling temperature, in training and, without suites of their own, evaluation; 1 samples from the unscaled policy. Minimum 0.01, the lowest that engines sample at.",
    )
    refresh: Literal["group", "turn"] = Field(
        "group",
        description="When training episodes go over to a newer version. group: one version samples all turns of a group. turn: the newest version that the "
        "engine serves samples each turn, so long episodes end with fresher tokens; their conversation is computed anew after each change. A group is as stale "
        "as its oldest turn may be. In strict mode there is no newer version.",
    )
    stop: Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)] = Field(
        (),
        description="Strings that end a reply, beside the model's end tokens. They are found on the text, across tokens. The reply keeps the string, and all of its "
        "sampled tokens are trained. A special token is named by its text. Absent: only the end tokens do.",
    )
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=LARGEST_INTEGER)], ...], Field(max_length=MAX_STOPS)
    ] = Field(
        (),
        description="Ids of tokens that end a reply, beside the model's end tokens; they are not part of its text. Absent: none.",
    )
    chat_template: ChatTemplateSpec = Field(
        default_factory=lambda: ChatTemplateSpec(),
        description="Chat template of the job's conversations; its file or name replaces the pool's template. By default the pool's chatTemplate, or else the model's own.",
    )


class TrainingSpec(Spec):
    """Algorithm, loss, optimizer and data of the training."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.algorithm) || self.algorithm != 'reinforce++' || !has(self.maxStaleness) || self.maxStaleness > 0",
                _STRICT_SPANS_NO_BATCH,
            ),
            (
                "!has(self.baseline) || !has(self.baseline.type) || self.baseline.type == 'group' || !has(self.algorithm) || self.algorithm != 'reinforce++'",
                _BASELINE_IS_NO_BATCH,
            ),
            (
                "!has(self.credit) || !has(self.credit.type) || self.credit.type == 'episode' || !has(self.algorithm) || self.algorithm != 'reinforce++'",
                _CREDIT_IS_NO_BATCH,
            ),
            (
                "!has(self.credit) || !has(self.credit.type) || self.credit.type == 'episode' || !has(self.baseline) || !has(self.baseline.type) || self.baseline.type == 'group'",
                _CREDIT_NEEDS_GROUP,
            ),
            (
                "!has(self.algorithm) || self.algorithm != 'rloo' || !has(self.clip) || (!has(self.clip.low) && !has(self.clip.high))",
                _RLOO_HAS_NO_CLIP,
            ),
            (
                "!has(self.updatesPerStep) || (has(self.groupsPerStep) ? self.groupsPerStep : 8) % self.updatesPerStep == 0",
                _UNEQUAL_UPDATES,
            ),
            (_SFT_RULE, _SFT_HAS_NO_REWARDS),
            (_DISTIL_RULE, _DISTIL_NEEDS_TEACHER),
            (_DISTIL_REWARDS_RULE, _DISTIL_HAS_NO_REWARDS),
            (unchanged("distillation"), f"distillation {NO_CHANGE[1]}"),
            (unchanged("deterministic"), f"deterministic {NO_CHANGE[1]}"),
        )
    )
    algorithm: Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo", "sft", "distill"] = Field(
        "dapo",
        description="Algorithm; docs/reference/algorithms.md compares them. grpo: advantages are rewards standardised within the group. dr-grpo: centred only, "
        "with equal weight for every token. dapo: grpo with equal weight for every token and a higher upper clip. gspo: one "
        "importance ratio per sequence. rloo: policy gradient without a clip; each reward minus the mean of the group's others. reinforce++: rewards "
        "standardised over the step; not in strict mode. cispo: clips importance weights and drops no token. sft: supervised fine-tuning on the environment's "
        "demonstrations (docs/how-to/sft.md). distill: imitates a frozen agent (docs/how-to/distill.md).",
        json_schema_extra=FIXED,
    )
    steps: int = Field(
        ge=0,
        le=10_000_000,
        description="Number of optimizer steps to train; may be raised later. 0: the job only evaluates version 0.",
        json_schema_extra=rules(("self >= oldSelf", "may be raised but not lowered: finished steps cannot be undone")),
    )
    groups_per_step: int = Field(
        8, ge=1, le=4096, description="Number of groups (tasks) in one optimizer step (P).", json_schema_extra=FIXED
    )
    updates_per_step: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of optimizer updates that a step takes from its groups. Each trains groupsPerStep / updatesPerStep groups, in the order of "
        "their positions, as soon as they are sampled. The clip then bounds how far the step moves the policy. Must divide groupsPerStep. A step still "
        "makes one version.",
        json_schema_extra=FIXED,
    )
    epochs: int = Field(
        1,
        ge=1,
        le=16,
        description="Number of times that a step trains its groups: updatesPerStep x epochs updates in all, each epoch in the same order.",
        json_schema_extra=FIXED,
    )
    microbatch_tokens: int = Field(
        4096,
        ge=16,
        le=16_777_216,
        description="Maximum tokens, padding included, of one forward and backward pass; limits the trainer's memory. It affects results only by rounding. "
        "If a step runs out of device memory, the trainer halves the value, repeats the step and keeps the smaller value for later steps.",
        json_schema_extra=FIXED,
    )
    optimizer: OptimizerSpec = Field(
        default_factory=lambda: OptimizerSpec(),
        description="Settings of AdamW and of the learning rate schedule.",
        json_schema_extra=FIXED,
    )
    max_staleness: int = Field(
        2,
        ge=0,
        le=16,
        description="Maximum number of policy versions by which a trained group may be behind the trainer. 0 is strict mode: on-policy, and bitwise "
        "reproducible with the pool's rollout.engine reference on the same kind of CPU with as many threads (docs/reference/models.md, Reproducibility); vLLM's "
        "sampling depends on its batch. 1 or more lets sampling and training overlap: a step waits for slow groups that many steps later, and an agent uses "
        "that many adapter slots more.",
        json_schema_extra=FIXED,
    )
    deterministic: bool | None = Field(
        None,
        description="Whether the trainer uses only deterministic GPU kernels, so that the same recorded turns give the same adapter, bit for bit, on the same GPU "
        "model, driver and packages. false allows the fastest kernels, which may sum in another order each time. CPUs compute the same either way. Absent: "
        "true if maxStaleness is 0. It cannot change.",
    )
    max_refill: int = Field(
        2,
        ge=0,
        le=16,
        description="Limit on replacing groups without signal (all rewards equal): one step samples at most maxRefill x groupsPerStep further groups.",
        json_schema_extra=FIXED,
    )
    flat_groups: Literal["excluded", "counted"] = Field(
        "excluded",
        description="Whether groups without signal lower the step's loss. excluded: the loss is a mean over the groups that train, so a step in which one "
        "of eight groups has signal is as large as any. counted: the loss is multiplied by the share of groupsPerStep that trains, as if the others were in "
        "the mean with a gradient of zero.",
        json_schema_extra=FIXED,
    )
    ratio: Literal["proximal", "behaviour"] = Field(
        "proximal",
        description="Importance ratio that the algorithm's clip bounds. proximal: trained policy / trainer's policy at the start of the step; it is 1 in "
        "the step's first update, and correction weights each token by trainer/sampler. behaviour: trained policy / policy that sampled, as "
        "in the papers; the clip then drops tokens whose ratio staleness or rounding has moved too far. cispo always uses behaviour.",
        json_schema_extra=FIXED,
    )
    clip: ClipSpec = Field(
        default_factory=lambda: ClipSpec(),
        description="Clip bounds of the ratio that `ratio` selects.",
        json_schema_extra=FIXED,
    )
    baseline: BaselineSpec = Field(
        default_factory=lambda: BaselineSpec(),
        description="Baseline of the advantage; by default, the rewards of the episode's group.",
        json_schema_extra=FIXED,
    )
    credit: CreditSpec = Field(
        default_factory=lambda: CreditSpec(),
        description="How rewards are credited to turns; by default, every turn has the episode's advantage.",
        json_schema_extra=FIXED,
    )
    kl: KlSpec = Field(
        default_factory=lambda: KlSpec(),
        description="KL penalty; none by default.",
        json_schema_extra=FIXED,
    )
    entropy: EntropySpec = Field(
        default_factory=lambda: EntropySpec(),
        description="Entropy bonus; none by default.",
        json_schema_extra=FIXED,
    )
    correction: CorrectionSpec = Field(
        default_factory=lambda: CorrectionSpec(),
        description="Importance-sampling correction.",
        json_schema_extra=FIXED,
    )
    overlong: OverlongSpec = Field(
        default_factory=lambda: OverlongSpec(),
        description="Penalty for turns that come near maxTokens, and filter for episodes that a limit cut off.",
        json_schema_extra=FIXED,
    )
    data: DataSpec = Field(
        default_factory=lambda: DataSpec(),
        description="Selection and order of the training tasks.",
        json_schema_extra=FIXED,
    )
    seed: int = Field(
        0,
        ge=0,
        le=LARGEST_INTEGER,
        description="Seed of task selection, sampling and initial adapter weights.",
        json_schema_extra=FIXED,
    )
    distillation: DistillationSpec | None = Field(
        None, description="The teacher of the algorithm distill. Absent: no teacher, for every other algorithm."
    )

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        if self.algorithm == "reinforce++" and self.max_staleness == 0:
            raise ValueError(_STRICT_SPANS_NO_BATCH)
        if self.algorithm == "reinforce++" and self.baseline.type != "group":
            raise ValueError(_BASELINE_IS_NO_BATCH)
        if self.credit.type != "episode" and self.algorithm == "reinforce++":
            raise ValueError(_CREDIT_IS_NO_BATCH)
        if self.credit.type != "episode" and self.baseline.type != "group":
            raise ValueError(_CREDIT_NEEDS_GROUP)
        if self.groups_per_step % self.updates_per_step:
            raise ValueError(f"{_UNEQUAL_UPDATES}; found {self.updates_per_step} and {self.groups_per_step}")
        if self.algorithm == "rloo" and (self.clip.low is not None or self.clip.high is not None):
            raise ValueError(_RLOO_HAS_NO_CLIP)
        if self.algorithm == "sft" and self._has_rl_terms:
            raise ValueError(_SFT_HAS_NO_REWARDS)
        if (self.algorithm == "distill") != (self.distillation is not None):
            raise ValueError(_DISTIL_NEEDS_TEACHER)
        if self.algorithm == "distill" and self._uses_rewards:
            raise ValueError(_DISTIL_HAS_NO_REWARDS)
        return self

    @property
    def _uses_rewards(self) -> bool:
        """Whether a setting says how rewards train."""
        is_weighed = self.baseline.type != "group" or self.credit.type != "episode"
        return is_weighed or self.overlong.tokens > 0 or self.kl.added_to == "reward" or self.data.skip is not None

    @property
    def _has_rl_terms(self) -> bool:
        """Whether a setting needs rewards, or a policy that has sampled the tokens."""
        clip, overlong = self.clip, self.overlong
        terms = (self.kl.coefficient, self.entropy.coefficient, self.correction.type, overlong.tokens, overlong.filter)
        is_weighed = self.baseline.type != "group" or self.credit.type != "episode"
        return is_weighed or clip != ClipSpec() or any(terms) or self.data.skip is not None


class SuiteSpec(Spec):
    """One suite of the evaluation: held-out tasks, how they are sampled, and how many times."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"(has(self.tasks) ? self.tasks : 64) * (has(self.samples) ? self.samples : 1) <= {_MAX_EPISODES}",
                _TOO_MANY_EPISODES,
            )
        )
    )
    name: SuiteName = Field(description="Name of the suite, in status, tables, plots and trackers.")
    environment: SuiteEnvironmentSpec | None = Field(
        None,
        description="Environment of the suite's tasks, which is never trained on. Absent: the job's environment.",
    )
    tasks: int = Field(
        64,
        ge=1,
        le=100_000,
        description="Number of held-out tasks. Every suite has the first ones of its environment, so that suites can be compared.",
    )
    samples: int = Field(
        1,
        ge=1,
        le=1024,
        description="Episodes of each task. With several, the suite has pass@k for k of 1, 2, 4 and so on, and, if the environment gives answers "
        "(Score.answer), the reward of the most frequent answer.",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="Sampling temperature; 0 is greedy. Absent: rollout.temperature.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Maximum tokens that one turn generates. Absent: rollout.maxTokens.",
    )
    solved_reward: float = Field(
        0.5,
        ge=-LARGEST_INTEGER,
        le=LARGEST_INTEGER,
        description="Reward from which an episode counts as solved, for pass@k. The default is half of the usual range of 0 to 1.",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.tasks * self.samples > _MAX_EPISODES:
            raise ValueError(f"{_TOO_MANY_EPISODES}; found {self.tasks * self.samples}")
        return self


class EvaluationSpec(Spec):
    """Evaluation on held-out tasks: one set, sampled as in training, or several suites."""

    model_config = ConfigDict(
        # has(): the API server checks the rule on the default `{}` before it fills in the defaults of inner fields
        json_schema_extra=rules(
            (
                "!has(self.promote) || self.promote != 'best' || !has(self.tasks) || self.tasks > 0 || (has(self.suites) && self.suites.size() > 0)",
                _PROMOTE_NEEDS_TASKS,
            ),
            (
                "!has(self.suite) || (has(self.suites) && self.suites.exists(one, one.name == self.suite))",
                _UNKNOWN_SUITE,
            ),
        )
    )
    every: int = Field(
        10,
        ge=1,
        le=10_000_000,
        description="Steps between evaluations; version 0 and the last version are always evaluated.",
    )
    tasks: int = Field(
        64,
        ge=0,
        le=100_000,
        description="Number of held-out tasks per evaluation, without suites; 0 disables evaluation. With 64, the mean reward has a standard error of about 0.06.",
    )
    promote: Literal["last", "best"] = Field(
        "last",
        description="Version that the finished job publishes: the last one, or the one with the best evaluation.",
    )
    suites: Annotated[tuple[SuiteSpec, ...], Field(max_length=16)] = Field(
        (),
        description="Named evaluations that replace tasks, each with its own number of tasks, samples, temperature and maxTokens; none by default.",
        json_schema_extra=list_map("name"),
    )
    suite: SuiteName | None = Field(
        None,
        description="Suite whose mean reward is the job's: in tables, in the curve, and for promote: best. Absent: the first.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [suite.name for suite in self.suites]
        if len(set(names)) != len(names):
            raise ValueError("suites must have different names")
        if self.suite is not None and self.suite not in names:
            raise ValueError(f"{_UNKNOWN_SUITE}; found {self.suite}")
        if self.promote == "best" and self.tasks == 0 and not self.suites:
            raise ValueError(_PROMOTE_NEEDS_TASKS)
        return self


class CheckpointSpec(Spec):
    """Retention of training states. Adapter files of all versions are kept while the job exists."""

    keep: int = Field(
        2,
        ge=1,
        le=1000,
        description="Number of newest versions whose training state (optimizer moments) is kept for restarts.",
    )

"""The training settings of a job in its document; `marlaas_api.kinds` documents the meaning of the fields."""

from typing import Literal

from marlaas_api.messages.agent_settings import EntropySettings
from marlaas_api.messages.base import SpecPart


class BaselineSettings(SpecPart):
    """What an episode's reward is compared with."""

    type: Literal["group", "running-mean"] = "group"
    decay: float = 0.9


class CreditSettings(SpecPart):
    """Settings of the credit that an episode's rewards give to its turns."""

    type: Literal["episode", "turn", "state"] = "episode"
    discount: float = 1.0
    weight: float = 1.0


class OptimizerSettings(SpecPart):
    """AdamW and its learning rate."""

    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    min_learning_rate_ratio: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class ClipSettings(SpecPart):
    """Bounds of the clipped ratio. None: the algorithm's own."""

    low: float | None = None
    high: float | None = None


class ReferenceSettings(SpecPart):
    """Reference policy of the KL penalty. Neither field: version 0."""

    path: str | None = None
    versions_behind: int | None = None


class KlSettings(SpecPart):
    """KL penalty."""

    coefficient: float = 0.0
    added_to: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3"] | None = None
    reference: ReferenceSettings = ReferenceSettings()


class CorrectionSettings(SpecPart):
    """Correction for the ratio trainer/sampler. None: the algorithm's own."""

    type: Literal["truncated", "masked-token", "masked-sequence", "icepop", "none"] | None = None
    cap: float | None = None
    floor: float | None = None


class DistillationSettings(SpecPart):
    """Distillation from a frozen agent of the job."""

    teacher: str


class OverlongSettings(SpecPart):
    """Treatment of overlong replies."""

    tokens: int = 0
    filter: bool = False


class SkipSettings(SpecPart):
    """Rules for skipping tasks without signal."""

    after: int = 1
    passes: int = 2
    max_share: float = 0.5
    solved_reward: float = 0.5


class DataSettings(SpecPart):
    """The training tasks and their order."""

    tasks: int | None = None
    order: Literal["sequential", "shuffled"] = "sequential"
    skip: SkipSettings | None = None


class TrainingSettings(SpecPart):
    """Algorithm, loss, optimizer and data."""

    algorithm: Literal["grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo", "sft", "distill"] = "dapo"
    steps: int
    groups_per_step: int = 8
    updates_per_step: int = 1
    epochs: int = 1
    microbatch_tokens: int = 4096
    optimizer: OptimizerSettings = OptimizerSettings()
    max_staleness: int = 1
    deterministic: bool | None = None
    max_refill: int = 2
    flat_groups: Literal["excluded", "counted"] = "excluded"
    ratio: Literal["proximal", "behaviour"] = "proximal"
    clip: ClipSettings = ClipSettings()
    baseline: BaselineSettings = BaselineSettings()
    credit: CreditSettings = CreditSettings()
    kl: KlSettings = KlSettings()
    entropy: EntropySettings = EntropySettings()
    correction: CorrectionSettings = CorrectionSettings()
    overlong: OverlongSettings = OverlongSettings()
    data: DataSettings = DataSettings()
    seed: int = 0
    distillation: DistillationSettings | None = None

    @property
    def has_running_baseline(self) -> bool:
        """Whether rewards are compared with a running mean, so that every episode has an advantage."""
        return self.baseline.type == "running-mean"

    @property
    def needs_no_others(self) -> bool:
        """Whether an episode has an advantage without others of its group: that of a running mean, or a teacher's."""
        return self.has_running_baseline or self.distillation is not None

    @property
    def credits_turns(self) -> bool:
        """Whether turns have advantages of their own."""
        return self.credit.type != "episode"

    @property
    def groups_per_update(self) -> int:
        """Number of groups in one optimizer update."""
        return self.groups_per_step // self.updates_per_step

    @property
    def has_several_updates(self) -> bool:
        """Whether a step is more than one optimizer update."""
        return self.updates_per_step * self.epochs > 1

    @property
    def is_deterministic(self) -> bool:
        """Whether the trainer uses deterministic kernels only: a strict job does, unless it says otherwise."""
        return self.max_staleness == 0 if self.deterministic is None else self.deterministic

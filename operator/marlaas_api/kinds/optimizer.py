"""AdamW and the learning rate: the job's settings, and one agent's changes to them."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import Spec, rules
from marlaas_api.numeric import LARGEST_INTEGER

_FLOOR_NEEDS_DECAY = "minLearningRateRatio needs schedule linear or cosine, because constant does not decay: remove it, or choose another schedule"
_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Spec):
    """Settings of AdamW and of the learning rate schedule."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.minLearningRateRatio) || (has(self.schedule) && self.schedule != 'constant')",
                _FLOOR_NEEDS_DECAY,
            ),
        )
    )
    learning_rate: float = Field(
        1e-4,
        ge=0,
        le=10,
        description="Peak learning rate. LoRA needs about ten times the learning rate of full fine-tuning. 0 changes no weight: it measures a run without training.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after the warm-up. constant: the peak. linear, cosine: decay until training.steps, linearly or along half a cosine. Steps "
        "without signal count. If steps is raised later, the remaining steps follow the schedule of the new number, so the rate may rise.",
    )
    warmup_steps: int = Field(
        0, ge=0, le=1_000_000, description="Number of steps of linear warm-up; 0 starts at the peak."
    )
    min_learning_rate_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Final learning rate of the linear and cosine schedules, as a fraction of the peak. Absent: 0.",
    )
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.999), description="AdamW's decay rates of the first and second moment.")
    epsilon: float = Field(
        1e-8,
        gt=0,
        le=1,
        description="Added to the square root of AdamW's second moment. A larger value makes smaller updates where gradients are tiny.",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=10, description="Decoupled weight decay; 0 by default, because adapter weights stay small anyway."
    )
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        le=LARGEST_INTEGER,
        description="Maximum norm of the gradient; a larger gradient is scaled down to this norm.",
    )

    @model_validator(mode="after")
    def _floor_has_decay(self) -> Self:
        if self.min_learning_rate_ratio is not None and self.schedule == "constant":
            raise ValueError(_FLOOR_NEEDS_DECAY)
        return self


class AgentOptimizer(Spec):
    """Optimizer settings of one agent. An absent field has the value of the job's `training.optimizer`."""

    learning_rate: float | None = Field(None, ge=0, le=10, description="Peak learning rate. Absent: the job's.")
    schedule: Literal["constant", "linear", "cosine"] | None = Field(
        None, description="Learning rate after the warm-up. Absent: the job's."
    )
    warmup_steps: int | None = Field(
        None, ge=0, le=1_000_000, description="Number of steps of linear warm-up. Absent: the job's."
    )
    min_learning_rate_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Final learning rate of the linear and cosine schedules, as a fraction of the peak. Absent: the job's, which has no effect on a constant schedule.",
    )
    weight_decay: float | None = Field(None, ge=0, le=10, description="Decoupled weight decay. Absent: the job's.")
    max_grad_norm: float | None = Field(
        None, gt=0, le=LARGEST_INTEGER, description="Maximum norm of the gradient. Absent: the job's."
    )

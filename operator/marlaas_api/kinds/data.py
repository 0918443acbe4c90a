"""Selection of training tasks: the set or stream, its order, and rules for skipping tasks without signal."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import Spec, rules
from marlaas_api.numeric import LARGEST_INTEGER

_SKIP_NEEDS_TASKS = "skip needs tasks: in an endless stream every task comes once, so there is none to skip"
_SHUFFLED_NEEDS_TASKS = "order: shuffled needs tasks: an endless stream has no order to shuffle"


class SkipSpec(Spec):
    """Rules for skipping tasks whose groups had no variance: always right or wrong, they give no signal until the policy changes."""

    after: int = Field(
        1,
        ge=1,
        le=16,
        description="A task rests once its last so many groups were all solved, or all hopeless; 1 believes the first.",
    )
    passes: int = Field(
        2, ge=1, le=1000, description="Passes through the data for which a task rests; then it is tried once more."
    )
    max_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Largest share of a pass that is skipped, at any point of it; beyond it tasks are played all the same.",
    )
    solved_reward: float = Field(
        0.5,
        ge=-LARGEST_INTEGER,
        le=LARGEST_INTEGER,
        description="Reward from which a group without variance counts as solved, below it as hopeless; half of the "
        "usual scale of 0 to 1.",
    )


class DataSpec(Spec):
    """The training tasks: an endless stream, or a set that is passed through again and again."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.skip) || has(self.tasks)", _SKIP_NEEDS_TASKS),
            ("!has(self.order) || self.order != 'shuffled' || has(self.tasks)", _SHUFFLED_NEEDS_TASKS),
        )
    )
    tasks: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Size of the training set: tasks 0 to tasks - 1, again in every pass. Absent: an endless stream of new ones.",
    )
    order: Literal["sequential", "shuffled"] = Field(
        "sequential", description="shuffled: every pass in an order of its own, drawn from the job's seed."
    )
    skip: SkipSpec | None = Field(
        None, description="Tasks that are always right or always wrong rest for a while. Absent: none does."
    )

    @model_validator(mode="after")
    def _a_set(self) -> Self:
        if self.tasks is None and self.skip is not None:
            raise ValueError(_SKIP_NEEDS_TASKS)
        if self.tasks is None and self.order == "shuffled":
            raise ValueError(_SHUFFLED_NEEDS_TASKS)
        return self

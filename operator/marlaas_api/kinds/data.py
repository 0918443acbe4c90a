"""Selection of training tasks: the set or stream, its order, and rules for skipping tasks without signal."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from marlaas_api.kinds.base import Spec, rules
from marlaas_api.numeric import LARGEST_INTEGER

_SKIP_NEEDS_TASKS = "skip needs tasks: an endless stream contains every task once, so none can be skipped"
_SHUFFLED_NEEDS_TASKS = "order: shuffled needs tasks: an endless stream has no order to shuffle"


class SkipSpec(Spec):
    """Rules for skipping tasks whose groups had no variance in reward and so give no signal."""

    after: int = Field(
        1,
        ge=1,
        le=16,
        description="Number of consecutive groups without variance, all solved or all hopeless, after which a task is skipped; 1 skips after the first.",
    )
    passes: int = Field(
        2, ge=1, le=1000, description="Number of passes for which a task is skipped; then it is played again."
    )
    max_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Maximum fraction of a pass that is skipped, at every point of the pass; above it, tasks are played even if they should be skipped.",
    )
    solved_reward: float = Field(
        0.5,
        ge=-LARGEST_INTEGER,
        le=LARGEST_INTEGER,
        description="Reward from which a group without variance counts as solved; below it, the group counts as hopeless. The default is half of the usual "
        "range of 0 to 1.",
    )


class DataSpec(Spec):
    """The training tasks: an endless stream, or a fixed set that is passed through repeatedly."""

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
        description="Number of tasks in the training set; every pass plays tasks 0 to tasks - 1. Absent: an endless stream of new tasks.",
    )
    order: Literal["sequential", "shuffled"] = Field(
        "sequential",
        description="Order of the tasks within a pass. sequential: by index. shuffled: a new permutation in every pass, drawn from the job's seed.",
    )
    skip: SkipSpec | None = Field(
        None, description="Skipping of tasks that are always right or always wrong. Absent: no task is skipped."
    )

    @model_validator(mode="after")
    def _a_set(self) -> Self:
        if self.tasks is None and self.skip is not None:
            raise ValueError(_SKIP_NEEDS_TASKS)
        if self.tasks is None and self.order == "shuffled":
            raise ValueError(_SHUFFLED_NEEDS_TASKS)
        return self

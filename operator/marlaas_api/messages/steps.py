"""What the orchestrator writes down of steps and evaluations."""

from enum import StrEnum

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage


class StepOutcome(StrEnum):
    """A step either made a new version, or had no signal and is counted all the same."""

    COMMITTED = "committed"
    NO_OP = "no_op"


class Difficulty(StrEnum):
    """What a group said of its task: members earned differently, or all earned the same, which was right or wrong."""

    VARIED = "varied"
    SOLVED = "solved"
    HOPELESS = "hopeless"


class TaskOutcome(BusMessage):
    """How hard a training task was when it was visited; index: the task's, visit: the group's."""

    index: int
    visit: int
    difficulty: Difficulty


class StepRecord(JobMessage):
    """One finished step, exactly once; STEPS. Times are unix seconds; staleness in versions; faults by class during the step.

    indices: every group that was resolved in the step, with or without signal; reward_mean is over all of their episodes. outcomes: of jobs
    whose tasks may rest, the difficulty of each task resolved. num_dropped, dropped_tokens: groups that were too stale to train, and the tokens that
    were generated for them. skipped_*: visits to tasks that were left out since the step before.
    """

    step: int
    outcome: StepOutcome
    version: int
    at: float
    wall_s: float
    reward_mean: float
    reward_std: float
    indices: tuple[int, ...]
    num_groups: int
    num_episodes: int
    num_zero_variance: int = 0
    num_dropped: int = 0
    dropped_tokens: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    outcomes: tuple[TaskOutcome, ...] = ()
    staleness_mean: float = 0.0
    staleness_max: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)


class EvalSample(BusMessage):
    """A held-out episode for people to read."""

    index: int
    prompt: str
    reply: str
    reward: float


class EvalRecord(JobMessage):
    """Mean reward on the held-out tasks at one version; STEPS, `eval.…`."""

    step: int
    version: int
    at: float
    reward_mean: float
    num_episodes: int
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: tuple[EvalSample, ...] = ()

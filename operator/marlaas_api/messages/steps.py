"""The orchestrator's records of steps and evaluations."""

from enum import StrEnum

from pydantic import Field

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.plays import StepPlays
from marlaas_api.messages.usage import UsageAmounts


class StepOutcome(StrEnum):
    """Outcome of a step: a new version, or nothing that trains. Both count as a step."""

    COMMITTED = "committed"
    NO_OP = "no_op"


class UntrainedCause(StrEnum):
    """Why a group trained no token of an agent.

    FLAT: all rewards are equal. OUT_OF_TURNS: all rewards are equal, and every episode used up its turns. FAULTED: too many
    episodes ended with a fault. UNCALLED: too few episodes called the agent. STALE: it was too stale. FILTERED:
    `training.overlong.filter` left out all replies. EMPTY: no reply has a token. MASKED: `training.correction` left out all tokens.
    """

    FLAT = "flat"
    OUT_OF_TURNS = "out-of-turns"
    FAULTED = "faulted"
    UNCALLED = "uncalled"
    STALE = "stale"
    FILTERED = "filtered"
    EMPTY = "empty"
    MASKED = "masked"


class Difficulty(StrEnum):
    """Difficulty of a task, from the rewards of its group: different, or all equal and high, or all equal and low."""

    VARIED = "varied"
    SOLVED = "solved"
    HOPELESS = "hopeless"


class TaskOutcome(BusMessage):
    """Difficulty of a training task at one visit. index: the task's. visit: the group's."""

    index: int
    visit: int
    difficulty: Difficulty


class AgentStep(BusMessage):
    """One agent's part of a finished step. outcome: of this agent. reward_mean: over the
    episodes whose task may call it; None if there are none. untrained: of a trained agent without a new version, the number of
    its groups by cause.
    """

    outcome: StepOutcome
    version: int
    reward_mean: float | None = None
    num_groups: int = 0
    num_zero_variance: int = 0
    num_dropped: int = 0
    staleness_mean: float = 0.0
    untrained: dict[UntrainedCause, int] = Field(default_factory=dict)


class StepRecord(JobMessage):
    """One finished step, exactly once; stream STEPS. Times are unix seconds; staleness is in versions; faults are by class."""

    step: int
    outcome: StepOutcome
    """COMMITTED if any agent has a new version."""
    version: int
    """Sum of the versions of the agents, which is the agent's version if there is one."""
    at: float
    wall_s: float
    reward_mean: float
    """Over the episodes of all groups of the step, of the team's reward, as `reward_std`: the mean over the trained agents that the
    episode's task may call.
    """
    reward_std: float
    indices: tuple[int, ...]
    """Every group that was resolved in the step, with or without signal."""
    num_groups: int
    """Groups that train any agent."""
    num_episodes: int
    num_zero_variance: int = 0
    """Groups without variance for every agent."""
    num_dropped: int = 0
    """Groups that were too stale to train, over all trained agents."""
    dropped_tokens: int = 0
    """Generated tokens of the dropped groups."""
    skipped_solved: int = 0
    """Visits to solved tasks that were skipped since the previous step."""
    skipped_hopeless: int = 0
    """Visits to hopeless ones."""
    outcomes: tuple[TaskOutcome, ...] = ()
    """For jobs that may skip tasks, the difficulty of each resolved task."""
    staleness_mean: float = 0.0
    """Over all trained agents, as `staleness_max`."""
    staleness_max: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    """Of the trainer; if there are several policies, each name begins with `<agent>/`."""
    usage: dict[str, UsageAmounts] = Field(default_factory=dict)
    """By agent, what the episodes of the resolved groups used, and the trainer for the step."""
    agents: dict[str, AgentStep] = Field(default_factory=dict)
    """The part of each agent."""
    plays: StepPlays = StepPlays()
    is_demonstrated: bool = False
    """The step trained demonstrations; they have no rewards, so `reward_mean` is 0 and means nothing."""

    def metric(self, name: str) -> float:
        """Return the sum of a metric over the agents; 0 if no agent has it."""
        return sum(value for key, value in self.metrics.items() if key.rpartition("/")[2] == name)


class EvalSample(BusMessage):
    """A held-out episode for people to read. index: of the held-out task."""

    suite: str = ""
    index: int
    prompt: str
    reply: str
    reward: float


class SuiteResult(BusMessage):
    """Results of one suite, over its episodes without a fault.

    standard_error: of reward_mean, over the means of the tasks; None for fewer than two tasks. pass_at: by k, the probability that
    one of k samples of a task is solved, mean over the tasks with at least k samples. majority: mean reward of each task's most
    frequent answer; None for one sample, and if the environment gives no answers.
    """

    reward_mean: float
    standard_error: float | None = None
    num_tasks: int = 0
    num_episodes: int = 0
    pass_at: dict[str, float] = Field(default_factory=dict)
    majority: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class EvalRecord(JobMessage):
    """Mean reward on the held-out tasks; stream STEPS, subject `eval.…`.

    version: the sum of the agents' versions, as in `StepRecord`. versions, usage: by agent. rewards: by agent, the mean over
    the tasks that may call it. reward_mean: mean over the episodes of the team's reward, as in `StepRecord`. num_prompts:
    distinct tasks, by first prompt and drawn content; num_overlapping: those of them that were trained on before. suites: results by
    name, of a job that has suites; rewards, reward_mean and metrics are then those of its main suite. data_digests: as of `StepPlays`.
    """

    step: int
    version: int
    at: float
    reward_mean: float
    num_episodes: int
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: tuple[EvalSample, ...] = ()
    usage: dict[str, UsageAmounts] = Field(default_factory=dict)
    versions: dict[str, int] = Field(default_factory=dict)
    rewards: dict[str, float] = Field(default_factory=dict)
    num_prompts: int = 0
    num_overlapping: int = 0
    data_digests: tuple[str, ...] = ()
    suites: dict[str, SuiteResult] = Field(default_factory=dict)

    def suite_figures(self) -> dict[str, float]:
        """Return the figures of the suites by name: `aime`, `aime pass@4`, `aime majority`."""
        found: dict[str, float] = {}
        for name, suite in self.suites.items():
            found[name] = suite.reward_mean
            found |= {f"{name} pass@{k}": value for k, value in suite.pass_at.items() if k != "1"}
            if suite.majority is not None:
                found[f"{name} majority"] = suite.majority
        return found

"""Data of a figure, made from a job's records: curves over steps, and working times. Pure; independent of the drawing library.

A curve's x is the number of finished steps: the evaluation before training is at 0, the first step's values are at
1. NaN is a gap.

Working times are unix seconds. engine: at least one turn of the job was being generated. environment: at least one
episode was between two turns, in its own code or in a tool. trainer: the step's computation as the trainer measured
it, up to the step's end.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import AgentStep, EvalRecord, JobDocument, StepRecord
from marlaas_api.messages.agent_settings import AgentSettings

NAN = float("nan")
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a curve, each with the half-width of its band if it has one. `bounds` limits the band."""

    points: Points
    band: tuple[float, ...] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def xs(self) -> list[float]:
        """Numbers of finished steps."""
        return [x for x, _ in self.points]

    @property
    def ys(self) -> list[float]:
        """Values of the points."""
        return [y for _, y in self.points]

    def edges(self) -> tuple[list[float], list[float]]:
        """Return the lower and upper edge of the band."""
        low, high = self.bounds
        pairs = list(zip(self.ys, self.band, strict=True))
        return [max(low, y - half) for y, half in pairs], [min(high, y + half) for y, half in pairs]


@dataclass(frozen=True, slots=True)
class JobCurves:
    """All curves of one job, by the title of their panel. `group` is the tenant, by which many jobs are coloured."""

    name: str
    curves: Mapping[str, Curve] = field(default_factory=dict)
    group: str = ""


REWARD, EVAL, LENGTH, ENTROPY = (
    "reward in training",
    "reward, held out",
    "tokens per episode",
    "entropy, nats per token",
)
KL, GAP, STALENESS, WALL = "KL per token", "logprob gap, trainer to engine", "staleness, versions", "seconds per step"
PANELS = (REWARD, EVAL, LENGTH, ENTROPY, KL, GAP, STALENESS, WALL)
LOSS, HELD_OUT_LOSS = "loss of demonstrations", "loss of held-out demonstrations"


def panels_of(jobs: Sequence[JobCurves]) -> tuple[str, ...]:
    """Return the titles of the panels: those of demonstrations only if a job has them."""
    own = (title for title in (LOSS, HELD_OUT_LOSS) if any(title in job.curves for job in jobs))
    return (*PANELS, *own)


def job_curves(
    name: str, document: JobDocument, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]
) -> list[JobCurves]:
    """Return all curves of a job; of several agents, those of each that is trained. `steps` and `evals` are in order.

    KL is towards the teacher if the job has one, towards version 0 if it has a KL penalty, else towards the behaviour policy.
    """
    agents = [agent for agent in document.spec.agents if agent.trainable]
    if len(document.spec.agents) > 1:
        return [_agent_curves(f"{name}, {agent.name}", agent, document, steps, evals) for agent in agents]
    size, metric = document.spec.rollout.group_size, _metrics_of(steps)
    curves = {
        REWARD: reward_curve(steps),
        EVAL: eval_curve(evals),
        LENGTH: _over(steps, lambda step: length(step, size)),
        STALENESS: _over(steps, lambda step: step.staleness_mean if step.num_groups else NAN),
    }
    curves |= _trainer_curves(document, metric) | {WALL: _over(steps, lambda step: step.wall_s)}
    return [JobCurves(name, curves | _of_demonstrations(steps))]


def _agent_curves(
    name: str, agent: AgentSettings, document: JobDocument, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]
) -> JobCurves:
    """Return the curves of one of several agents. Metrics of the trainer are those of the policy that it plays."""
    policy = f"{agent.policy_name}/" if len(document.spec.policies) > 1 else ""
    size = document.spec.rollout.group_size
    metric = _metrics_of(steps, policy)

    def tokens(step: StepRecord) -> float:
        own = step.agents.get(agent.policy_name)
        episodes = own.num_groups * (1 if step.is_demonstrated else size) if own else 0
        return step.metrics.get(f"{policy}tokens", NAN) / episodes if episodes else NAN

    curves = {
        REWARD: agent_curve(agent.name, steps),
        EVAL: Curve(tuple((float(record.step), record.rewards.get(agent.name, NAN)) for record in evals)),
        LENGTH: _over(steps, tokens),
        STALENESS: _over(steps, lambda step: _of_agent(step, agent.name, lambda own: own.staleness_mean)),
        WALL: _over(steps, lambda step: step.wall_s),
    }
    return JobCurves(name, curves | _trainer_curves(document, metric) | _of_demonstrations(steps, policy))


def _trainer_curves(document: JobDocument, metric: Callable[[str], Curve]) -> dict[str, Curve]:
    kl = "kl" if document.spec.training.kl.coefficient > 0 else "behaviour_kl"
    if document.spec.teacher is not None:
        kl = "teacher_kl"
    return {ENTROPY: metric("entropy"), KL: metric(kl), GAP: metric("logprob_gap")}


def _of_demonstrations(steps: Sequence[StepRecord], prefix: str = "") -> dict[str, Curve]:
    """Return the losses of demonstrations; the held-out ones are measured before the step. Empty for steps without demonstrations."""
    own = [step for step in steps if step.is_demonstrated]
    trained = [(step.step + 1.0, step.metrics.get(f"{prefix}loss", NAN)) for step in own]
    held_out = [(float(step.step), step.metrics.get(f"{prefix}held_out_loss", NAN)) for step in own]
    found = {LOSS: trained, HELD_OUT_LOSS: [(x, y) for x, y in held_out if not math.isnan(y)]}
    return {title: Curve(tuple(points)) for title, points in found.items() if points}


def agent_curve(agent: str, steps: Sequence[StepRecord]) -> Curve:
    """Return an agent's mean reward in each step."""
    return _over(steps, lambda step: _of_agent(step, agent, lambda own: own.reward_mean))


def _of_agent(step: StepRecord, agent: str, value: Callable[[AgentStep], float | None]) -> float:
    own = step.agents.get(agent)
    found = None if own is None else value(own)
    return NAN if found is None else found


def reward_curve(steps: Sequence[StepRecord]) -> Curve:
    """Return the mean reward of each step's episodes, but of demonstrations. The band is its standard error, limited to the rewards' range."""
    played = [step for step in steps if not step.is_demonstrated]
    points = tuple((step.step + 1.0, step.reward_mean) for step in played)
    return Curve(points, tuple(_standard_error(step) for step in played), reward_range(played))


def eval_curve(evals: Sequence[EvalRecord]) -> Curve:
    """Return the mean reward on held-out tasks, over the number of steps finished before."""
    return Curve(tuple((float(record.step), record.reward_mean) for record in evals))


def suite_curves(evals: Sequence[EvalRecord]) -> dict[str, Curve]:
    """Return the figures of the evaluation's suites by name (`EvalRecord.suite_figures`); none of a single one that is the job's reward."""
    figures = [(float(record.step), record.suite_figures()) for record in evals]
    names = list(dict.fromkeys(name for _, found in figures for name in found))
    if len(names) < 2:
        return {}
    return {name: Curve(tuple((x, found.get(name, NAN)) for x, found in figures)) for name in names}


def length(step: StepRecord, group_size: int) -> float:
    """Return the generated tokens per trained episode; NaN for a step that trained none."""
    trained = step.num_groups * (1 if step.is_demonstrated else group_size)
    return step.metric("tokens") / trained if trained and step.metrics else NAN


def reward_range(steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Return the bounds of the rewards: [0, 1] if the mean and deviation of every step allow it, else infinite.

    Rewards in [0, 1] with mean m have a variance of at most m (1 - m) (Bhatia and Davis, 2000).
    """
    fits = all(
        0.0 <= step.reward_mean <= 1.0 and step.reward_std**2 <= step.reward_mean * (1.0 - step.reward_mean) + 1e-9
        for step in steps
    )
    return (0.0, 1.0) if fits else (-math.inf, math.inf)


def _standard_error(step: StepRecord) -> float:
    return step.reward_std / math.sqrt(step.num_episodes) if step.num_episodes else 0.0


def _metrics_of(steps: Sequence[StepRecord], prefix: str = "") -> Callable[[str], Curve]:
    """Return a function that returns the curve of a metric of the trainer."""
    return lambda name: _over(steps, lambda step: step.metrics.get(f"{prefix}{name}", NAN) if step.num_groups else NAN)


def _over(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> Curve:
    return Curve(tuple((step.step + 1.0, value(step)) for step in steps))


Interval = tuple[float, float]
TRAIN_S = "train_s"
"""Metric of a step: seconds of the trainer's forward pass, backward pass and optimizer."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Disjoint intervals in order, per lane. None: the records lack this time.

    run: folder of the job's run, whose jobs have a common time. group: the tenant, by which many jobs are grouped.
    """

    name: str
    begin: float
    end: float
    engine: tuple[Interval, ...] | None
    environment: tuple[Interval, ...] | None
    trainer: tuple[Interval, ...] | None
    run: str = ""
    group: str = ""

    def lanes(self) -> dict[str, tuple[Interval, ...] | None]:
        """Return the three lanes by name."""
        return {"engine": self.engine, "environment": self.environment, "trainer": self.trainer}

    def share(self, intervals: Sequence[Interval]) -> float:
        """Return the share of the whole time that the intervals cover."""
        return sum(end - begin for begin, end in intervals) / max(self.end - self.begin, 1e-9)


def timeline(name: str, episodes: Iterable[EpisodeRecord], steps: Sequence[StepRecord]) -> Timeline | None:
    """Return the job's timeline; None if the records lack all working times."""
    records = list(episodes)
    engine = union(_generating(records))
    environment = union(interval for record in records for interval in _playing(record))
    trainer = union((step.at - step.metric(TRAIN_S), step.at) for step in steps if step.metric(TRAIN_S))
    whole = union([*engine, *environment, *((step.at - step.wall_s, step.at) for step in steps)])
    has_turns, has_training = bool(engine), bool(trainer)
    if not (has_turns or has_training):
        return None
    return Timeline(
        name,
        whole[0][0],
        max(end for _, end in whole),
        engine if has_turns else None,
        environment if has_turns else None,
        trainer if has_training else None,
    )


def union(intervals: Iterable[Interval], gap_s: float = 0.0) -> tuple[Interval, ...]:
    """Return disjoint intervals that cover the same time, in order. Intervals up to `gap_s` apart are joined."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return tuple(joined)


def _generating(records: Iterable[EpisodeRecord]) -> Iterator[Interval]:
    for record in records:
        for turn in record.turns:
            yield (turn.at - turn.engine_s, turn.at)


def _playing(record: EpisodeRecord) -> Iterator[Interval]:
    """Yield the times between a turn's end and the next request, and from the last turn to the episode's end if recorded."""
    turns = sorted(record.turns, key=lambda turn: turn.at)
    for before, after in pairwise(turns):
        yield (before.at, after.at - after.engine_s - after.queue_s)
    if turns:
        yield (turns[-1].at, record.at)

"""Evaluation: when a job is evaluated, and the results. Every version plays the same held-out tasks with the same seeds."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import Episode, EvalRecord, SuiteResult
from marlaas_api.messages.job_spec import EvaluationSettings, JobSpec, SuiteSettings


@dataclass(slots=True)
class EvaluationRun:
    """An evaluation in progress.

    Attributes:
        version: sum of the agents' versions, which names the evaluation.
        step: number of finished steps after which these versions were the newest; the evaluation may begin later.
        settings: the job's evaluation settings: its suites, tasks and samples.
        versions: the evaluated versions, by agent.
        episodes: the episodes that have ended, by task index and member. The index counts the tasks of all suites. If a member was played
            twice, its first episode is kept.
    """

    version: int
    step: int
    settings: EvaluationSettings
    versions: Mapping[str, int]
    episodes: dict[tuple[int, int], Episode] = field(default_factory=dict)

    def add(self, episode: Episode) -> bool:
        """Add an episode that has ended, unless its member already has one; return whether it was added."""
        return self.episodes.setdefault((episode.index, episode.member), episode) is episode

    @property
    def complete(self) -> bool:
        """Whether every episode has ended."""
        return len(self.episodes) == self.settings.num_episodes

    def missing(self) -> list[tuple[int, int]]:
        """Return task index and member of each episode that has not ended."""
        suites = [self.settings.at(index)[0] for index in range(self.settings.num_tasks)]
        wanted = ((index, member) for index, suite in enumerate(suites) for member in range(suite.samples))
        return [key for key in wanted if key not in self.episodes]

    def sampled(self, number: int) -> list[tuple[int, int]]:
        """Return task index and member of the episodes to record for people: the first sample of each suite's first `number` tasks."""
        return [(index, 0) for index in range(self.settings.num_tasks) if self.settings.at(index)[1] < number]

    def scored(self) -> list[Episode]:
        """Return the episodes without a fault, in the order of tasks and members."""
        return [self.episodes[key] for key in sorted(self.episodes) if self.episodes[key].fault is None]

    def suite(self, name: str) -> "SuiteRun":
        """Return the episodes of the suite `name` that have no fault."""
        own = [one for one in self.scored() if self.settings.at(one.index)[0].name == name]
        return SuiteRun(next(suite for suite in self.settings.plan if suite.name == name), own)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """The episodes of one suite, and the results that are computed from them.

    Attributes:
        settings: of the suite.
        episodes: those that ended without a fault, in the order of tasks and members.
    """

    settings: SuiteSettings
    episodes: Sequence[Episode]

    def rewards(self, agents: Sequence[str]) -> dict[str, float]:
        """Return each agent's mean reward over the episodes whose task may call it. An agent without such episodes is absent."""
        called = {agent: [one for one in self.episodes if one.may_call(agent)] for agent in agents}
        return {
            agent: statistics.fmean(one.rewards.get(agent, 0.0) for one in own) for agent, own in called.items() if own
        }

    def team_reward(self, agents: Sequence[str]) -> float:
        """Return the mean team reward of the episodes; NaN if no episode has one.

        The team reward of an episode is the mean reward of those of `agents` that its task may call.
        """
        known = [reward for rewards in self._by_task(agents).values() for reward, _ in rewards]
        return statistics.fmean(known) if known else math.nan

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the episodes that have it."""
        values: dict[str, list[float]] = {}
        for episode in self.episodes:
            for name, value in episode.metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(some) / len(some) for name, some in values.items()}

    def result(self, agents: Sequence[str]) -> SuiteResult:
        """Return the suite's results. The reward of an episode is its team reward (`team_reward`). agents: names of the trained agents."""
        tasks = list(self._by_task(agents).values())
        means = [statistics.fmean(reward for reward, _ in own) for own in tasks]
        spread = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
        return SuiteResult(
            reward_mean=self.team_reward(agents),
            standard_error=spread,
            num_tasks=len(tasks),
            num_episodes=len(self.episodes),
            pass_at=self._pass_at(tasks),
            majority=_majority(tasks) if self.settings.samples > 1 else None,
            metrics=self.metrics(),
        )

    def _by_task(self, agents: Sequence[str]) -> dict[int, list[tuple[float, str]]]:
        """Return, by task index, the team reward and the answer of each sample. Samples without a team reward are left out.

        Args:
            agents: names of the trained agents.
        """
        found: dict[int, list[tuple[float, str]]] = {}
        for episode in self.episodes:
            reward = team_reward(episode, agents)
            if not math.isnan(reward):
                found.setdefault(episode.index, []).append((reward, episode.answer))
        return found

    def _pass_at(self, tasks: Sequence[Sequence[tuple[float, str]]]) -> dict[str, float]:
        num = self.settings.samples
        ks = sorted({1, num, *(2**power for power in range(1, num.bit_length()))}) if num > 1 else []
        solved = [[reward >= self.settings.solved_reward for reward, _ in own] for own in tasks]
        found = {k: [pass_at(k, len(own), sum(own)) for own in solved if len(own) >= k] for k in ks if k <= num}
        return {str(k): statistics.fmean(own) for k, own in found.items() if own}


def pass_at(k: int, num: int, num_solved: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is solved: 1 - C(num - num_solved, k) / C(num, k).

    Source: Codex (arXiv 2107.03374), equation 1. num: samples of the task, at least k.
    """
    return 1.0 - math.comb(num - num_solved, k) / math.comb(num, k)


def _majority(tasks: Sequence[Sequence[tuple[float, str]]]) -> float | None:
    """Return the mean over tasks of the reward of the most frequent answer, the first of equally frequent ones; None if no sample has an answer.

    Source: self-consistency (arXiv 2203.11171). Samples without an answer do not vote; a task without any answer counts 0.

    Args:
        tasks: reward and answer of each sample, by task.
    """
    if not any(answer for own in tasks for _, answer in own):
        return None
    return statistics.fmean(_of_majority(own) for own in tasks)


def _of_majority(samples: Sequence[tuple[float, str]]) -> float:
    votes = Counter(answer for _, answer in samples if answer)
    if not votes:
        return 0.0
    winner, _ = votes.most_common(1)[0]
    return statistics.fmean(reward for reward, answer in samples if answer == winner)


def evaluated_text(record: EvalRecord) -> str:
    """Return an evaluation's results as text for people: by suite, or if there are no suites, the mean reward.

    If some tasks were played more than once, the mean reward is followed by the numbers of episodes and distinct tasks.
    """
    if record.suites:
        return f"version {record.version}: " + "; ".join(
            suite_text(name, suite) for name, suite in record.suites.items()
        )
    text = f"version {record.version}: mean reward {record.reward_mean:.3f}"
    is_repeated = 0 < record.num_prompts < record.num_episodes
    return f"{text} over {record.num_episodes} episodes of {record.num_prompts} distinct tasks" if is_repeated else text


def suite_text(name: str, suite: SuiteResult) -> str:
    """Return a suite's result for people: `aime 0.410 ± 0.03, pass@4 0.620, majority 0.500`; 0.410 is the mean reward, 0.03 its standard error."""
    spread = "" if suite.standard_error is None else f" ± {suite.standard_error:.2g}"
    most = max(suite.pass_at, key=int, default="1")
    passed = f", pass@{most} {suite.pass_at[most]:.3f}" if most != "1" else ""
    majority = "" if suite.majority is None else f", majority {suite.majority:.3f}"
    return f"{name} {suite.reward_mean:.3f}{spread}{passed}{majority}"


def without_samples(record: EvalRecord) -> EvalRecord:
    """Return a record without its samples and metrics. The records of a job stay in memory, and decisions do not need these large parts."""
    return record.model_copy(update={"samples": (), "metrics": {}})


class EvaluationSchedule:
    """Decides which evaluation of a job is next. An evaluation that could not begin when it was due is made later.

    A strict job evaluates the versions after each due step, so that its evaluations depend on its seed alone. Other jobs
    evaluate version 0 first. Later, once a due step is on record, they evaluate the versions that are the newest when the evaluation begins.

    Args:
        agents: names of the agents that have a policy.
        strict: whether the job is strictly on-policy (maxStaleness 0).
    """

    def __init__(self, agents: Iterable[str], *, strict: bool) -> None:
        self._strict = strict
        self._missing: dict[int, Mapping[str, int]] = {0: dict.fromkeys(agents, 0)}

    def add_step(self, spec: JobSpec, finished: int, versions: Mapping[str, int]) -> None:
        """Add the versions after `finished` recorded steps, if these are to be evaluated (`spec.evaluates`). versions: by agent."""
        if spec.evaluates(finished):
            self._missing[finished] = dict(versions)

    def next(
        self, spec: EvaluationSettings, known: Mapping[int, EvalRecord], finished: int, newest: Mapping[str, int]
    ) -> EvaluationRun | None:
        """Return the next evaluation; None if none is due.

        Args:
            spec: the job's evaluation settings; if they have no tasks, no evaluation is due.
            known: recorded evaluations by version. A version is evaluated once.
            finished: number of recorded steps.
            newest: newest committed versions, by agent.
        """
        last = max((one.step for one in known.values()), default=-1)
        for step, versions in list(self._missing.items()):
            if step <= last or sum(versions.values()) in known:
                del self._missing[step]
        is_exact = self._strict or not known
        found = self._missing if is_exact else dict.fromkeys([finished] if self._missing else [], newest)
        runs = (EvaluationRun(sum(versions.values()), step, spec, versions) for step, versions in found.items())
        return next((run for run in runs if spec.num_tasks > 0 and run.version not in known), None)


def team_reward(episode: Episode, agents: Sequence[str]) -> float:
    """Return an episode's mean reward over those of the `agents` that its task may call; NaN if it may call none of them."""
    rewards = [episode.rewards.get(agent, 0.0) for agent in agents if episode.may_call(agent)]
    return statistics.fmean(rewards) if rewards else math.nan


def best(records: dict[int, float], last: int, promote: str) -> int:
    """Return the version to promote: the last one, or the one with the highest evaluation (the later of equals).

    An evaluation whose episodes all ended in faults (NaN) is ignored.

    Args:
        records: mean rewards of the evaluations, by version.
        last: the version after the last step.
        promote: `last` or `best`.
    """
    known = {version: reward for version, reward in records.items() if not math.isnan(reward)}
    if promote == "last" or not known:
        return last
    return max(known, key=lambda version: (known[version], version))

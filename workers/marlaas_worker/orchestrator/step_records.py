"""Builds the records of steps and evaluations. Pure."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import (
    AgentStep,
    Episode,
    EvalRecord,
    EvalSample,
    GroupOutcome,
    GroupPlays,
    GroupResolution,
    GroupUnused,
    JobDocument,
    Lengths,
    Manifest,
    StepOutcome,
    StepPlays,
    StepRecord,
    TaskOutcome,
    Turn,
    UntrainedCause,
    UntrainedStep,
    UsageAmounts,
)
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.usage import merged
from marlaas_worker.orchestrator.evaluation import EvaluationRun, team_reward
from marlaas_worker.orchestrator.experience import count_faults
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.open_groups import AgentDraft, StepDraft


@dataclass(frozen=True, slots=True)
class Around:
    """Inputs of a step's record, besides the step's groups and manifests.

    Attributes:
        began_at: unix seconds of the record of the step before, or of the job's start.
        ended_at: unix seconds of this record.
        skips: how often tasks were skipped since the step before, as (because they were solved, because they were hopeless).
        outcomes: difficulties of the step's tasks, as far as they are known.
        untrained: for each agent that had groups in the step and made no version, the trainer's report of that.
    """

    began_at: float
    ended_at: float
    skips: tuple[int, int] = (0, 0)
    outcomes: tuple[TaskOutcome, ...] = ()
    untrained: Mapping[str, UntrainedStep] = field(default_factory=dict)


def around(state: JobState, draft: StepDraft, started_at: float, now: float) -> Around:
    """Return times, skips, difficulties and reports (`Around`) for the record of a step that is recorded now.

    started_at: the job's start, unix seconds. now: unix seconds.
    """
    return Around(
        began_at=state.last_step.at if state.last_step else started_at,
        ended_at=now,
        skips=state.tasks.new_skips(state.recorded.skips),
        outcomes=state.tasks.outcomes(draft.resolved),
        untrained={
            agent: one for agent, record in state.policies.items() for one in record.untrained if one.step == draft.step
        },
    )


def step_record(
    document: JobDocument, draft: StepDraft, manifests: Mapping[str, Manifest], around: Around
) -> StepRecord:
    """Return the record of a finished step.

    Args:
        draft: the groups of the step.
        manifests: by agent, the manifest of the version that the step made; no entry if it made none.
        around: the other values of the record.
    """
    made: dict[str, Manifest | UntrainedStep] = {**manifests, **around.untrained}
    trainer = {agent: UsageAmounts(trainer_s=one.train_s) for agent, one in made.items()}
    used = {agent: _untrained_use(one) if agent in around.untrained else one for agent, one in draft.usage().items()}
    players = [(agent, draft.agents[agent.policy_name]) for agent in document.spec.agents]
    agents = {agent.name: _agent_step(agent, part, made.get(agent.policy_name)) for agent, part in players}
    is_demonstrated = draft.step < document.spec.demonstrated_steps
    if is_demonstrated:
        agents = {name: one.model_copy(update={"reward_mean": None}) for name, one in agents.items()}
    rewards = _team_rewards((agent, part) for agent, part in players if agent.trainable)
    trained = [draft.agents[agent.name] for agent in document.spec.policies if agent.trainable]
    staleness = [ready.staleness for part in trained for ready in part.assigned]
    dropped = [group for part in trained for group in part.dropped]
    return StepRecord(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        step=draft.step,
        outcome=StepOutcome.COMMITTED if manifests else StepOutcome.NO_OP,
        version=sum(agents[agent.name].version for agent in document.spec.policies),
        at=around.ended_at,
        wall_s=around.ended_at - around.began_at,
        reward_mean=statistics.fmean(rewards) if rewards else 0.0,
        reward_std=statistics.pstdev(rewards) if rewards else 0.0,
        indices=tuple(sorted(draft.decided)),
        num_groups=len(draft.trained),
        num_episodes=_num_episodes(players),
        num_zero_variance=_num_flat(trained),
        num_dropped=len({group.index for group in dropped}),
        dropped_tokens=sum(group.usage.stale_tokens for group in dropped),
        skipped_solved=around.skips[0],
        skipped_hopeless=around.skips[1],
        outcomes=around.outcomes,
        staleness_mean=statistics.fmean(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        faults=dict(draft.faults()),
        metrics=_metrics(made, by_agent=len(draft.agents) > 1),
        usage=merged(used, trainer),
        agents=agents,
        plays=_plays(draft),
        is_demonstrated=is_demonstrated,
    )


def _plays(draft: StepDraft) -> StepPlays:
    """Return the summary of the plays of a step's groups, for its record. A group counts once, even if it was decided for several agents."""
    by_index = {index: group.plays for index, group in draft.decided.items()}
    signal = {group.index for group in draft.resolved if group.outcome is GroupOutcome.SIGNAL}
    flat = {group.index for group in draft.resolved if group.outcome is GroupOutcome.FLAT} - signal
    groups = list(by_index.values())
    return StepPlays(
        trained=_lengths([by_index[index] for index in draft.trained]),
        flat=_lengths([by_index[index] for index in flat]),
        dropped=_lengths([by_index[index] for index in signal - draft.trained]),
        prompts=tuple(sorted({by_index[index].prompt for index in draft.trained} - {""})),
        num_prompts=len({one.prompt for one in groups} - {""}),
        num_mixed=sum(one.is_mixed for one in groups),
        num_turns=sum(one.num_turns for one in groups),
        num_cut=sum(one.num_cut for one in groups),
        num_overtime=sum(one.num_overtime for one in groups),
        data_digests=tuple(sorted({one.data_digest for one in groups} - {""})),
    )


def _lengths(groups: Sequence[GroupPlays]) -> Lengths:
    tokens = sorted(number for one in groups for number in one.tokens)
    if not tokens:
        return Lengths(num_groups=len(groups))
    last = len(tokens) - 1
    return Lengths(
        num_groups=len(groups),
        mean=statistics.fmean(tokens),
        p10=tokens[round(0.1 * last)],
        p90=tokens[round(0.9 * last)],
        max=tokens[-1],
        seconds=statistics.fmean(one.seconds for one in groups),
    )


def _untrained_use(amounts: UsageAmounts) -> UsageAmounts:
    """Return an agent's usage in a step that trained none of its tokens: those that were to be trained count as tokens without signal."""
    moved = amounts.zero_variance_tokens + amounts.trained_tokens
    return amounts.model_copy(update={"zero_variance_tokens": moved, "trained_tokens": 0})


def _metrics(made: Mapping[str, Manifest | UntrainedStep], *, by_agent: bool) -> dict[str, float]:
    """Return the trainers' metrics of a step. by_agent: whether their names are `agent/metric` instead of `metric`."""
    found: dict[str, float] = {}
    for agent, manifest in made.items():
        own = {**manifest.metrics, "train_s": manifest.train_s}
        found |= {f"{agent}/{name}" if by_agent else name: value for name, value in own.items()}
    return found


def _rewards(agent: AgentSettings, part: AgentDraft) -> list[float]:
    """Return an agent's rewards in a step. part: the step's draft for the policy that the agent plays."""
    return [reward for group in part.resolved for reward in _of_player(agent, group)]


def _of_player(agent: AgentSettings, group: GroupResolution) -> tuple[float, ...]:
    return group.rewards if agent.policy is None else group.other_rewards.get(agent.name, ())


def _team_rewards(players: Iterable[tuple[AgentSettings, AgentDraft]]) -> list[float]:
    """Return, for each episode of a step, the mean reward over those of the agents that its task may call.

    players: each agent, with the step's draft for the policy that it plays.
    """
    by_group: defaultdict[int, list[tuple[float, ...]]] = defaultdict(list)
    for agent, part in players:
        for group in part.resolved:
            if rewards := _of_player(agent, group):
                by_group[group.index].append(rewards)
    return [statistics.fmean(own) for rewards in by_group.values() for own in zip(*rewards, strict=False)]


def _num_episodes(players: Iterable[tuple[AgentSettings, AgentDraft]]) -> int:
    """Return the number of episodes without a fault in a step. players: each agent, with the step's draft for the policy that it plays."""
    sizes: Counter[int] = Counter()
    for agent, part in players:
        for group in part.resolved:
            sizes[group.index] = max(sizes[group.index], len(_of_player(agent, group)))
    return sizes.total()


def _agent_step(agent: AgentSettings, part: AgentDraft, made: Manifest | UntrainedStep | None) -> AgentStep:
    """Return an agent's entry in the record of a step.

    Args:
        part: the step's draft for the policy that the agent plays.
        made: manifest of the version that the step made of this policy, or the report that it trained no token; None: it had no groups.
    """
    rewards = _rewards(agent, part)
    manifest, untrained = (made, None) if isinstance(made, Manifest) else (None, made)
    staleness = [ready.staleness for ready in part.assigned]
    return AgentStep(
        outcome=StepOutcome.NO_OP if manifest is None else StepOutcome.COMMITTED,
        version=part.base_version if manifest is None else manifest.version,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        num_groups=len(part.assigned),
        num_zero_variance=sum(group.outcome is GroupOutcome.FLAT for group in part.resolved),
        num_dropped=len(part.dropped),
        staleness_mean=statistics.fmean(staleness) if staleness else 0.0,
        untrained=dict(_causes(part, untrained)) if manifest is None and agent.trainable else {},
    )


def _causes(part: AgentDraft, made: UntrainedStep | None) -> Counter[UntrainedCause]:
    """Return how many groups of a step trained no token of a policy, by cause.

    Args:
        part: the step's draft for the policy.
        made: the trainer's report that its groups trained no token; None if there is none.
    """
    found = Counter({made.cause: len(part.assigned)} if made is not None else {})
    found.update(_cause(group) for group in part.resolved if isinstance(group, GroupUnused))
    return found


def _cause(group: GroupUnused) -> UntrainedCause:
    if group.outcome is GroupOutcome.FLAT and group.is_out_of_turns:
        return UntrainedCause.OUT_OF_TURNS
    return UntrainedCause.STALE if group.outcome is GroupOutcome.SIGNAL else UntrainedCause(group.outcome)


def _num_flat(parts: Iterable[AgentDraft]) -> int:
    """Return the number of groups that are flat (equal rewards) for at least one agent, and have signal for none. parts: of one step, by agent."""
    outcomes = [(group.index, group.outcome) for part in parts for group in part.resolved]
    flat = {index for index, outcome in outcomes if outcome is GroupOutcome.FLAT}
    return len(flat - {index for index, outcome in outcomes if outcome is GroupOutcome.SIGNAL})


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """Inputs of an evaluation's record, besides its episodes.

    Attributes:
        at: end of the evaluation, unix seconds.
        samples: a few episodes in readable form, for people.
        usage: usage of the evaluation's episodes, by agent.
        trained_prompts: digests of the prompts of the tasks trained on so far.
    """

    at: float
    samples: tuple[EvalSample, ...]
    usage: Mapping[str, UsageAmounts]
    trained_prompts: Container[str] = ()


def eval_record(document: JobDocument, run: EvaluationRun, end: EvaluationEnd) -> EvalRecord:
    """Return the record of a complete evaluation. run: the evaluation, with its episodes. end: the other values of the record."""
    agents, settings = document.spec.agents, run.settings
    trained = [agent.name for agent in agents if agent.trainable]
    main = run.suite(settings.main)
    prompts = {episode.prompt for episode in run.scored()} - {""}
    return EvalRecord(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        step=run.step,
        version=run.version,
        at=end.at,
        reward_mean=main.team_reward(trained),
        num_episodes=len(run.scored()),
        faults=dict(count_faults(run.episodes.values())),
        metrics=main.metrics(),
        samples=end.samples,
        usage=dict(end.usage),
        versions=dict(run.versions),
        rewards=main.rewards([agent.name for agent in agents]),
        num_prompts=len(prompts),
        num_overlapping=sum(prompt in end.trained_prompts for prompt in prompts),
        data_digests=tuple(sorted({one.data_digest for one in run.scored()} - {""})),
        suites={suite.name: run.suite(suite.name).result(trained) for suite in settings.suites},
    )


def sample(episode: Episode, turns: Mapping[str, Sequence[Turn]], trained: Sequence[str]) -> EvalSample:
    """Return an episode in readable form, for people: its first prompt, and all replies joined by arrows, in order of time.

    Args:
        turns: by agent, the turns of its last conversation. If there are several agents, each reply begins with the agent's name.
        trained: the trained agents; the reward is the mean of those that the task may call.
    """
    order = sorted(
        (turn for conversation in turns.values() for turn in conversation), key=lambda turn: (turn.at, turn.turn)
    )
    texts = [f"{turn.agent}: {turn.text}" if len(turns) > 1 else turn.text for turn in order]
    return EvalSample(
        index=episode.index,
        prompt=_prompt(order[0]) if order else "",
        reply=" → ".join(texts),
        reward=math.nan if episode.fault is not None else team_reward(episode, trained),
    )


def _prompt(turn: Turn) -> str:
    if isinstance(turn.append, str):
        return turn.append
    return turn.append[-1].content if turn.append else ""

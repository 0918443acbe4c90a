"""Usage of a job, from the files of its run: tokens by what became of them, seconds and bytes. Pure.

Tokens are those of the recorded turns. What the engines generated beyond them is `unrecorded`, so that the parts always
add up to the whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import JobDocument, JobSpec, Progress, StepRecord, TokenUse, UsageAmounts
from marlaas_api.messages.job_spec import AgentSettings
from marlaas_api.names import Split, group_token
from marlaas_worker.rl.advantages import has_signal


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one job; without names, of a tenant's deleted jobs. agents: by name, the parts that are known by agent."""

    tenant: str
    namespace: str
    job: str
    amounts: UsageAmounts
    agents: Mapping[str, UsageAmounts] = field(default_factory=dict)

    def as_dict(self) -> dict[str, str | int | float]:
        """Return one flat object, with `wasted_tokens` and without agents, for CSV and JSON."""
        names = {"tenant": self.tenant, "namespace": self.namespace, "job": self.job}
        return names | self.amounts.as_dict()


def usage_of(
    document: JobDocument, episodes: Iterable[EpisodeRecord], steps: Sequence[StepRecord], progress: Progress | None
) -> UsageRow:
    """Return a job's usage.

    Args:
        episodes: all recorded ones in the order of their ends, also repeated plays; one that comes twice counts once.
        steps: its finished steps.
        progress: its last published progress; None while its first run goes on. It has the engines' own count of
            generated tokens, and the seconds of engines and trainers.
    """
    records = list({record.episode: record for record in episodes}.values())
    turns = [turn for record in records for turn in record.turns]
    parts = _parts(document.spec, records, steps)
    recorded = sum(parts.values())
    unrecorded = max(0, progress.tokens - recorded) if progress is not None else 0
    amounts = UsageAmounts(
        prompt_tokens=sum(turn.num_prompt_tokens for turn in turns),
        cached_tokens=sum(turn.num_cached_tokens for turn in turns),
        generated_tokens=recorded + unrecorded,
        unrecorded_tokens=unrecorded,
        sandbox_s=sum(record.duration_s for record in records),
        **{use.value: tokens for use, tokens in parts.items()},
    )
    row = UsageRow(document.tenant, document.namespace, document.job, amounts)
    if progress is None:
        return row
    counted = UsageAmounts(
        engine_s=progress.accelerator_s,
        trainer_s=progress.trainer_s,
        admitted_s=progress.admitted_s,
        stored_bytes=progress.stored_bytes,
    )
    return UsageRow(document.tenant, document.namespace, document.job, amounts + counted)


def sums_by_tenant(rows: Iterable[UsageRow]) -> dict[str, UsageAmounts]:
    """Return the sum of each tenant's jobs, by tenant's name."""
    sums: dict[str, UsageAmounts] = defaultdict(UsageAmounts)
    for row in rows:
        sums[row.tenant] += row.amounts
    return dict(sorted(sums.items()))


def _parts(spec: JobSpec, records: Sequence[EpisodeRecord], steps: Sequence[StepRecord]) -> Counter[TokenUse]:
    """Return the generated tokens of the records by their use."""
    resolved = {index for step in steps for index in step.indices}
    first: dict[tuple[str, int], EpisodeRecord] = {}
    for record in records:
        first.setdefault((record.group, record.member), record)
    flat = _without_signal(spec, first.values())
    frozen = {agent.name for agent in spec.agents if not agent.trainable}
    policies = {agent.name: agent.policy_name for agent in spec.agents}
    parts: Counter[TokenUse] = Counter()
    for record in records:
        is_repeated = first[record.group, record.member] is not record
        for turn in record.turns:
            is_flat = (record.group, policies.get(turn.agent, turn.agent)) in flat
            use = _token_use(record, is_repeated, resolved, is_flat=is_flat)
            is_frozen = turn.agent in frozen and use in (TokenUse.TRAINED, TokenUse.ZERO_VARIANCE)
            parts[TokenUse.FROZEN if is_frozen else use] += len(turn.output_ids)
    # A step's record has the tokens of its stale groups, but not which of its groups these are.
    stale = min(parts[TokenUse.TRAINED], sum(step.dropped_tokens for step in steps))
    parts[TokenUse.TRAINED] -= stale
    parts[TokenUse.STALE] += stale
    return parts


def _token_use(record: EpisodeRecord, is_repeated: bool, resolved: set[int], *, is_flat: bool) -> TokenUse:
    if is_repeated:
        return TokenUse.REPEATED
    if record.fault is not None:
        return TokenUse.FAILED
    if record.split is Split.EVAL:
        return TokenUse.EVALUATION
    if int(group_token(record.group)[1:]) not in resolved:
        return TokenUse.OPEN
    return TokenUse.ZERO_VARIANCE if is_flat else TokenUse.TRAINED


def _without_signal(spec: JobSpec, records: Iterable[EpisodeRecord]) -> set[tuple[str, str]]:
    """Return the groups and policies for which all advantages are zero, as the orchestrator decides it."""
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        if record.fault is None:
            groups[record.group].append(record)
    is_alone, fewest = len(spec.agents) == 1, 1 if spec.training.has_running_baseline else 2

    def has_advantage(agent: AgentSettings, members: Sequence[EpisodeRecord]) -> bool:
        own, *choices = _compared(agent, members, is_alone=is_alone)
        is_compared = len(own) >= fewest and (spec.training.has_running_baseline or has_signal(own))
        return is_compared or any(len(rewards) > 1 and has_signal(rewards) for rewards in choices)

    return {
        (name, policy.name)
        for name, members in groups.items()
        for policy in spec.policies
        if not any(has_advantage(agent, members) for agent in spec.players(policy.name) if agent.trainable)
    }


def _compared(agent: AgentSettings, members: Sequence[EpisodeRecord], *, is_alone: bool) -> Iterator[Sequence[float]]:
    """Yield the rewards of an agent that are compared with each other: of the members, and of each choice."""
    yield [one.trained_reward(agent) for one in members if is_alone or one.speaks(agent.name)]
    for one in members:
        yield from (choice.rewards for choice in one.choices if choice.agent == agent.name)

"""Usage of a job, from the files of its run: tokens by what became of them, seconds and bytes. Pure.

Tokens are those of the recorded turns. What the engines generated beyond them was cut by preemptions, as far as the progress
says so, or is `unrecorded`, so that the parts always add up to the whole.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import JobDocument, JobSpec, Progress, StepRecord, TokenUse, UsageAmounts
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.usage import merged, total
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
            generated tokens, the seconds of engines and trainers, and by agent those of slots and the stored bytes.
    """
    records = list({record.episode: record for record in episodes}.values())
    agents = _by_policy(document.spec, records, steps)
    recorded = total(agents.values())
    row = UsageRow(document.tenant, document.namespace, document.job, recorded, agents)
    if progress is None:
        return row
    held = {
        name: UsageAmounts(slot_s=amounts.slot_s, stored_bytes=amounts.stored_bytes)
        for name, amounts in progress.usage.items()
    }
    rest = max(0, progress.tokens - recorded.generated_tokens)
    cut = min(rest, progress.amounts.preempted_tokens)
    unrecorded = UsageAmounts.generated({TokenUse.PREEMPTED: cut, TokenUse.UNRECORDED: rest - cut})
    return replace(row, amounts=progress.completed(recorded + unrecorded), agents=merged(agents, held))


def sums_by_tenant(rows: Iterable[UsageRow]) -> dict[str, UsageAmounts]:
    """Return the sum of each tenant's jobs, by tenant's name."""
    sums: dict[str, UsageAmounts] = defaultdict(UsageAmounts)
    for row in rows:
        sums[row.tenant] += row.amounts
    return dict(sorted(sums.items()))


def _by_policy(spec: JobSpec, records: Sequence[EpisodeRecord], steps: Sequence[StepRecord]) -> dict[str, UsageAmounts]:
    """Return what each policy used in the records and steps. Seconds of episodes count for the job's agents in equal parts."""
    policies = {agent.name: agent.policy_name for agent in spec.agents}
    parts = _parts(spec, records, steps)
    part_s = sum(record.duration_s for record in records) / len(policies)
    found: dict[str, UsageAmounts] = {}
    for policy in spec.policies:
        if policy.name == spec.teacher:  # Scores are no turns of the recorded episodes.
            scored = total(step.usage[policy.name] for step in steps if policy.name in step.usage)
            found[policy.name] = UsageAmounts(
                prompt_tokens=scored.prompt_tokens, engine_s=scored.engine_s, sandbox_s=part_s
            )
            continue
        names = {player.name for player in spec.players(policy.name)}
        turns = [
            turn for record in records for turn in record.turns if policies.get(turn.agent, turn.agent) == policy.name
        ]
        found[policy.name] = UsageAmounts.generated(parts.get(policy.name, {})).model_copy(
            update={
                "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
                "cached_tokens": sum(turn.num_cached_tokens for turn in turns),
                "engine_s": sum(turn.share_s for turn in turns),
                "sandbox_s": part_s * len(names),
                "trainer_s": sum(step.usage[policy.name].trainer_s for step in steps if policy.name in step.usage),
            }
        )
    return found


def _parts(
    spec: JobSpec, records: Sequence[EpisodeRecord], steps: Sequence[StepRecord]
) -> Mapping[str, Counter[TokenUse]]:
    """Return the generated tokens of the records by policy and use."""
    resolved = {index for step in steps for index in step.indices}
    first: dict[tuple[str, int], EpisodeRecord] = {}
    for record in records:
        first.setdefault((record.group, record.member), record)
    flat = _without_signal(spec, first.values())
    frozen = {agent.name for agent in spec.agents if not agent.trainable}
    policies = {agent.name: agent.policy_name for agent in spec.agents}
    parts: defaultdict[str, Counter[TokenUse]] = defaultdict(Counter)
    for record in records:
        is_repeated = first[record.group, record.member] is not record
        for turn in record.turns:
            policy = policies.get(turn.agent, turn.agent)
            use = _token_use(record, is_repeated, resolved, is_flat=(record.group, policy) in flat)
            is_frozen = turn.agent in frozen and use in (TokenUse.TRAINED, TokenUse.ZERO_VARIANCE)
            parts[policy][TokenUse.FROZEN if is_frozen else use] += len(turn.output_ids)
    for policy, uses in parts.items():
        # A step's record has the tokens of its stale groups, but not which of its groups these are.
        stale = min(uses[TokenUse.TRAINED], _stale(policy, steps, is_alone=len(spec.policies) == 1))
        uses[TokenUse.TRAINED] -= stale
        uses[TokenUse.STALE] += stale
    return parts


def _stale(policy: str, steps: Sequence[StepRecord], *, is_alone: bool) -> int:
    if is_alone:
        return sum(step.dropped_tokens for step in steps)
    return sum(step.usage[policy].stale_tokens for step in steps if policy in step.usage)


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
    is_alone, fewest = len(spec.agents) == 1, 1 if spec.training.needs_no_others else 2

    def has_advantage(agent: AgentSettings, members: Sequence[EpisodeRecord]) -> bool:
        own, *choices = _compared(agent, members, is_alone=is_alone)
        is_compared = len(own) >= fewest and (spec.training.needs_no_others or has_signal(own))
        return is_compared or any(len(rewards) > 1 and has_signal(rewards) for rewards in choices)

    return {
        (name, policy.name)
        for name, members in groups.items()
        for policy in spec.policies
        if not any(has_advantage(agent, members) for agent in spec.players(policy.name) if agent.trainable)
    }


def _compared(agent: AgentSettings, members: Sequence[EpisodeRecord], *, is_alone: bool) -> Iterator[Sequence[float]]:
    """Yield the rewards of an agent that are compared with each other: of the members, and of each choice."""
    yield [one.trained_reward(agent) for one in members if one.is_compared(agent.name, is_alone=is_alone)]
    for one in members:
        yield from (choice.rewards for choice in one.choices if choice.agent == agent.name)

"""Usage of episodes, summed from the turns that the rollout role recorded. Only the seconds of episodes come from the sandbox."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent
from marlaas_api.messages import Episode, Meter, TokenUse, Turn, UsageAmounts
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.usage import merged, total
from marlaas_api.names import JobRef, attempt_of
from marlaas_api.wire import BadMessage, unpack
from marlaas_worker.orchestrator.experience import CompleteGroup

MAX_PLAYS = 128
"""Maximum number of plays (attempts) of one member of a group whose tokens are counted by their use. The tokens of further plays count as
`unrecorded_tokens`, for which the job is charged. Only a sandbox that invents attempts has more plays.
"""

AgentAmounts = dict[str, UsageAmounts]
"""Usage by agent."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Meters:
    """Sums of the tokens and engine seconds of an agent's turns in one play. cached_tokens: prompt tokens from the engine's prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    engine_s: float = 0.0

    def add(self, meter: Meter) -> None:
        self.prompt_tokens += meter.prompt_tokens
        self.cached_tokens += meter.cached_tokens
        self.generated_tokens += meter.output_tokens
        self.engine_s += meter.share_s

    def amounts(self) -> UsageAmounts:
        """Return the sums. All generated tokens count as open, which means that their use is not decided."""
        return UsageAmounts(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            open_tokens=self.generated_tokens,
            engine_s=self.engine_s,
        )


@dataclass(slots=True, eq=False)
class _Play:
    """Usage of the turns of one play. A play is one attempt of a member of a group.

    Attributes:
        first: how often the job had been preempted before the first turn of the play.
        last: how often the job had been preempted before the last turn of the play.
        meters: sums over the turns of the play, by agent.
    """

    first: int
    last: int
    meters: dict[str, _Meters] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        self.first, self.last = min(self.first, turn.num_preemptions), max(self.last, turn.num_preemptions)
        self.meters.setdefault(turn.agent, _Meters()).add(turn.meter)

    @property
    def amounts(self) -> AgentAmounts:
        """The usage of the play, by agent. All generated tokens are open: their use is not decided."""
        return {agent: meters.amounts() for agent, meters in self.meters.items()}

    @property
    def cut(self) -> AgentAmounts:
        """The usage of the play, by agent, with all tokens counted as cut by a preemption of the job."""
        return {agent: one.preempted() for agent, one in self.amounts.items()}

    def counted_as(self, use: TokenUse) -> AgentAmounts:
        """Return the usage of the play, by agent, with all generated tokens counted as `use`."""
        return _counted_as(self.amounts, use)


class Metering:
    """Sums the usage of a job's agents: tokens and engine seconds from recorded turns, sandbox seconds from episodes.

    An episode's sandbox seconds are divided equally among the job's agents. Usage of an agent that plays another agent's policy is
    charged to that other agent.

    Each turn is read once from the stream TURNS. The sums of a member (one of a group's episodes, with all its attempts) are kept until
    `of_group` or `of_evaluation` returns them. The methods raise errors of the bus.

    Args:
        ref: the job.
        agents: all agents of the job.
        is_undecided: returns whether a group is in flight or part of the evaluation in progress. Turns of other groups are ignored.
    """

    def __init__(
        self, bus: Bus, blobs: Blobs, ref: JobRef, agents: Sequence[AgentSettings], is_undecided: Callable[[str], bool]
    ) -> None:
        self._bus, self._blobs, self._is_undecided = bus, blobs, is_undecided
        self._subject = subjects.turn(ref.namespace, ref.name, "*", "*")
        self._players = {agent.name: agent for agent in agents}
        self._next_sequence = 1
        self._plays: dict[tuple[str, int], dict[str, _Play]] = {}

    async def of_group(self, group: CompleteGroup) -> AgentAmounts:
        """Return the usage of a complete group by agent, failed, cut and repeated plays included. Call it once: it drops the group's turns.

        Generated tokens of episodes without a fault count as `open_tokens`, because it is not decided yet whether they are trained. Those of
        agents that play past versions count as `frozen_tokens`.
        """
        await self._read_new()
        return self._by_policy(self._of_episodes(group.episodes, group.repeats))

    async def of_evaluation(self, episodes: Collection[Episode]) -> AgentAmounts:
        """Return the usage of an evaluation's episodes by agent, with all attempts. Call it once: it drops the episodes' turns.

        Generated tokens of episodes without a fault count as `evaluation_tokens`; those of agents that play past versions, too.
        """
        await self._read_new()
        return self._by_policy(_counted_as(self._of_episodes(episodes), TokenUse.EVALUATION))

    async def of_cut_plays(self, members: Collection[tuple[str, int]], num_preemptions: int) -> UsageAmounts:
        """Return the usage of the plays that the job's next preemption cuts.

        Of each member, this is the last play, if the play's last turn was recorded since the job's last admission.

        Args:
            members: name of the group and number of each member that is open and has no Episode.
            num_preemptions: number of the job's preemptions before this one.
        """
        await self._read_new()
        plays = (self._plays[member] for member in members if member in self._plays)
        last = (own[max(own, key=attempt_of)] for own in plays)
        cut = [play.cut for play in last if play.last == num_preemptions]
        return total(amounts for play in cut for amounts in play.values())

    def _of_episodes(self, episodes: Collection[Episode], repeats: Sequence[Episode] = ()) -> AgentAmounts:
        """Return, by agent, the usage of all plays of some members, and drop the plays.

        Args:
            episodes: the play that counts of each member. Its failed and cut attempts before that play are included.
            repeats: later plays of these members.
        """
        part_s = sum(one.duration_s for one in episodes) / len(self._players)
        amounts = {agent: UsageAmounts(sandbox_s=part_s) for agent in self._players}
        for one in episodes:
            found = self._of_member(one, [again for again in repeats if again.member == one.member])
            amounts = merged(amounts, found)
        return amounts

    def _of_member(self, episode: Episode, repeats: Sequence[Episode]) -> AgentAmounts:
        """Return the usage of all plays of one member, by agent, and drop the plays.

        Args:
            episode: the Episode of the play that counts.
            repeats: the Episodes of the member's later plays.
        """
        plays = self._plays.pop((episode.group, episode.member), {})
        own, again = plays.pop(episode.episode, None), [plays.pop(one.episode, None) for one in repeats]
        before = sorted((attempt_of(name), name) for name in plays if attempt_of(name) < attempt_of(episode.episode))
        played = [plays[name] for _, name in before]
        cut = _cut(played, own)
        parts = [play.cut if play in cut else play.counted_as(TokenUse.FAILED) for play in played]
        if own is not None:
            parts.append(own.amounts if episode.fault is None else own.counted_as(TokenUse.FAILED))
        for play in again:
            if play is not None:
                is_cut = own is not None and play.first > own.last  # The play that counts ended before the preemption.
                parts.append(play.cut if is_cut else play.counted_as(TokenUse.REPEATED))
        return reduce(merged, parts, {})

    async def _read_new(self) -> None:
        async for page in self._bus.pages(subjects.TURNS, self._subject, self._next_sequence):
            for stored in page:
                turn = await self._turn(stored.data)
                if turn is not None and turn.agent in self._players and self._is_undecided(turn.group):
                    plays = self._plays.setdefault((turn.group, turn.member), {})
                    if turn.episode not in plays and len(plays) < MAX_PLAYS:
                        plays[turn.episode] = _Play(turn.num_preemptions, turn.num_preemptions)
                    if turn.episode in plays:
                        plays[turn.episode].add(turn)
                self._next_sequence = max(self._next_sequence, stored.sequence + 1)

    def _by_policy(self, amounts: AgentAmounts) -> AgentAmounts:
        """Charge each agent's usage to the agent whose policy it plays. Tokens of past versions are never trained."""
        found: AgentAmounts = {}
        for name, used_ in amounts.items():
            player = self._players[name]
            own = used_.counted_as(TokenUse.FROZEN) if player.plays_past else used_
            found = merged(found, {player.policy_name: own})
        return found

    async def _turn(self, data: bytes) -> Turn | None:
        """Decode a message of the stream TURNS; return None if it cannot be decoded, its blob is missing or corrupt, or it is not a Turn.

        The tokens of such a turn count as `unrecorded_tokens` in the job's usage. Raises UnsupportedSchema, BlobUnavailable.
        """
        try:
            message = await unpack(data, self._blobs)
        except (Permanent, BadMessage) as error:
            log.warning("cannot read a turn, its tokens count as unrecorded: %s", error)
            return None
        return message if isinstance(message, Turn) else None


def _counted_as(amounts: Mapping[str, UsageAmounts], use: TokenUse) -> AgentAmounts:
    return {agent: one.counted_as(use) for agent, one in amounts.items()}


def _cut(earlier: Sequence[_Play], counted: _Play | None) -> list[_Play]:
    """Return those of a member's earlier plays that a preemption of the job cut.

    The rollout role records with each turn how often the job had been preempted before it, so a sandbox cannot feign a preemption. Among
    the plays whose last turn has the same number, only the last play can have been cut. It was cut if a later play of the member has
    turns with a higher number.

    Args:
        earlier: plays of a member without an Episode, in the order of their attempts.
        counted: the member's play that counts, which has an Episode; None if no turn of it is recorded.
    """
    last = {play.last: play for play in earlier}
    until = max(last, default=0) if counted is None else counted.first
    return [play for number, play in last.items() if number < until]

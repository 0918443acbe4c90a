"""Usage of episodes, computed from the turns that the rollout role recorded.

Only the seconds of episodes come from the sandbox.
"""

import asyncio
import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent
from marlaas_api.messages import Episode, TokenUse, Turn, UsageAmounts
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.usage import merged, total
from marlaas_api.names import PREEMPTION_STRIDE, JobRef, attempt_of, episode_id
from marlaas_api.wire import BadMessage, unpack
from marlaas_worker.orchestrator.experience import CompleteGroup

MAX_READS = 16
MAX_PLAYS = 4096
MAX_EARLIER = 32
"""Most attempts to look for after the last preemption, and after each earlier one, if plays are read on their own. After a turn
that waited, numbers are skipped, so an attempt may be missed.
"""
MAX_EARLIER_PREEMPTIONS = 8

AgentAmounts = dict[str, UsageAmounts]
"""Usage by agent."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Play:
    """Usage of one play of a member, by agent.

    Attributes:
        first, last: preemptions of the job before the first and before the last of its turns.
    """

    amounts: AgentAmounts
    first: int
    last: int

    @property
    def cut(self) -> AgentAmounts:
        """The usage, if a preemption of the job cut the play."""
        return {agent: one.preempted() for agent, one in self.amounts.items()}

    def settled(self, use: TokenUse) -> AgentAmounts:
        """Return the usage with all tokens counted by their use."""
        return _settled(self.amounts, use)

    def __add__(self, other: "_Play") -> "_Play":
        return _Play(merged(self.amounts, other.amounts), min(self.first, other.first), max(self.last, other.last))


class Metering:
    """Reads what the agents of a job used in its episodes. The methods raise errors of the bus.

    Seconds of an episode count for its job's agents in equal parts. Usage of an agent that plays
    another agent's policy is charged to that other agent.

    New turns are read many at a time, each once, and kept until their member is counted, or its group closed. With more
    than `MAX_PLAYS` plays that are not counted, the turns of each episode are read on their own instead.
    """

    def __init__(self, bus: Bus, blobs: Blobs, ref: JobRef, agents: Sequence[AgentSettings]) -> None:
        self._bus, self._blobs, self._ref = bus, blobs, ref
        self._players = {agent.name: agent for agent in agents}
        self._reads = asyncio.Semaphore(MAX_READS)
        self._next_sequence = 1
        self._plays: dict[tuple[str, int], dict[str, _Play]] = {}
        self._is_too_large = False

    async def of_groups(self, groups: Iterable[CompleteGroup]) -> dict[int, AgentAmounts]:
        """Return the usage of complete groups by index. Tokens of episodes that count are open: their use is not decided."""
        groups = list(groups)
        if groups:
            await self._read_new()
        found = await asyncio.gather(*(self._of_group(group) for group in groups))
        return {group.index: amounts for group, amounts in zip(groups, found, strict=True)}

    async def of_evaluation(self, episodes: Iterable[Episode]) -> AgentAmounts:
        """Return the usage of an evaluation's episodes."""
        await self._read_new()
        return self._by_policy(_settled(await self._of_episodes(list(episodes)), TokenUse.EVALUATION))

    async def of_cut_plays(self, members: Collection[tuple[str, int]], num_preemptions: int) -> UsageAmounts:
        """Return the usage of the plays that the job's next preemption cuts: of each member the last play, if its last turn belongs to the present admission.

        With more than `MAX_PLAYS` plays the answer is 0: the plays are counted as cut only if their group is decided.

        Args:
            members: groups and members that are open and have no Episode.
            num_preemptions: of the job, before this one.
        """
        await self._read_new()
        last = (max(self._plays.get(member, {}).items(), key=_attempt, default=None) for member in members)
        cut = [one[1].cut for one in last if one is not None and one[1].last == num_preemptions]
        return total(amounts for play in cut for amounts in play.values())

    async def _of_group(self, group: CompleteGroup) -> AgentAmounts:
        return self._by_policy(await self._of_episodes(group.episodes, group.repeats))

    async def _of_episodes(self, episodes: Sequence[Episode], repeats: Sequence[Episode] = ()) -> AgentAmounts:
        """Return the usage of episodes that count, of the attempts before each, and of repeated plays."""
        part_s = sum(one.duration_s for one in episodes) / len(self._players)
        amounts = {agent: UsageAmounts(sandbox_s=part_s) for agent in self._players}
        found = await asyncio.gather(
            *(self._of_member(one, [again for again in repeats if again.member == one.member]) for one in episodes)
        )
        for used_ in found:
            amounts = merged(amounts, used_)
        return amounts

    async def _of_member(self, episode: Episode, repeats: Sequence[Episode]) -> AgentAmounts:
        """Return the usage of all plays of a member. episode: of the play that counts."""
        plays = await self._plays_of(episode, repeats)
        own, again = plays.pop(episode.episode, None), [plays.pop(one.episode, None) for one in repeats]
        before = sorted((attempt_of(name), name) for name in plays if attempt_of(name) < attempt_of(episode.episode))
        played = [plays[name] for _, name in before]
        cut = _cut(played, own)
        parts = [play.cut if play in cut else play.settled(TokenUse.FAILED) for play in played]
        if own is not None:
            parts.append(own.amounts if episode.fault is None else own.settled(TokenUse.FAILED))
        for play in again:
            if play is not None:
                is_cut = own is not None and play.first > own.last  # it had been played before the preemption
                parts.append(play.cut if is_cut else play.settled(TokenUse.REPEATED))
        return reduce(merged, parts, {})

    async def _read_new(self) -> None:
        if self._is_too_large:
            return
        subject = subjects.turn(self._ref.namespace, self._ref.name, "*", "*")
        async for page in self._bus.pages(subjects.TURNS, subject, self._next_sequence):
            for stored in page:
                turn = await self._turn(stored.data)
                if turn is not None:
                    plays, play = self._plays.setdefault((turn.group, turn.member), {}), self._play([turn])
                    plays[turn.episode] = plays[turn.episode] + play if turn.episode in plays else play
                self._next_sequence = max(self._next_sequence, stored.sequence + 1)
        if sum(map(len, self._plays.values())) > MAX_PLAYS:
            self._is_too_large = True
            self._plays.clear()

    def keep(self, open_groups: Container[str], endings: tuple[str, ...]) -> None:
        """Forget the plays of groups that are not open: turns that came after their member was counted.

        endings: of the names of further open groups.
        """
        kept = (member for member in self._plays if member[0] in open_groups or member[0].endswith(endings))
        self._plays = {member: self._plays[member] for member in kept}

    async def _plays_of(self, episode: Episode, repeats: Iterable[Episode]) -> dict[str, _Play]:
        """Return the plays of an episode's member that have turns, by name."""
        if not self._is_too_large:
            return self._plays.pop((episode.group, episode.member), {})
        names = list(dict.fromkeys([episode.episode, *_earlier(episode), *(one.episode for one in repeats)]))
        found = zip(names, await asyncio.gather(*map(self._of_play, names)), strict=True)
        return {name: play for name, play in found if play is not None}

    async def _of_play(self, name: str) -> _Play | None:
        """Read what a play used; None if it has no turn."""
        subject = subjects.turn(self._ref.namespace, self._ref.name, name, "*")
        async with self._reads:
            stored = await self._bus.replay(subjects.TURNS, subject)
            turns = [turn for one in stored if (turn := await self._turn(one.data)) is not None]
        return self._play(turns) if turns else None

    def _by_policy(self, amounts: AgentAmounts) -> AgentAmounts:
        """Charge each agent's usage to the agent whose policy it plays. Tokens of past versions are never trained."""
        found: AgentAmounts = {}
        for name, used_ in amounts.items():
            player = self._players[name]
            own = used_.settled(TokenUse.FROZEN) if player.plays_past else used_
            found = merged(found, {player.policy_name: own})
        return found

    def _play(self, turns: Sequence[Turn]) -> _Play:
        agents, numbers = {turn.agent for turn in turns}, [turn.num_preemptions for turn in turns]
        amounts = {name: used(one for one in turns if one.agent == name) for name in self._players if name in agents}
        return _Play(amounts, min(numbers), max(numbers))

    async def _turn(self, data: bytes) -> Turn | None:
        """Return a turn; None if it is damaged. Its tokens are then unrecorded. Raises UnsupportedSchema."""
        try:
            message = await unpack(data, self._blobs)
        except (Permanent, BadMessage) as error:
            log.warning("cannot read a turn, its tokens count as unrecorded: %s", error)
            return None
        return message if isinstance(message, Turn) else None


def _settled(amounts: Mapping[str, UsageAmounts], use: TokenUse) -> AgentAmounts:
    return {agent: one.settled(use) for agent, one in amounts.items()}


def used(turns: Iterable[Turn]) -> UsageAmounts:
    """Return the tokens and engine seconds of turns, the generated tokens as open."""
    meters = [turn.meter for turn in turns]
    generated = sum(meter.output_tokens for meter in meters)
    return UsageAmounts(
        prompt_tokens=sum(meter.prompt_tokens for meter in meters),
        cached_tokens=sum(meter.cached_tokens for meter in meters),
        generated_tokens=generated,
        open_tokens=generated,
        engine_s=sum(meter.share_s for meter in meters),
    )


def _attempt(play: tuple[str, _Play]) -> int:
    return attempt_of(play[0])


def _earlier(episode: Episode) -> list[str]:
    """Return the names of attempts before an episode, in their order; not every one was made."""
    preemptions, number = divmod(attempt_of(episode.episode), PREEMPTION_STRIDE)
    attempts = [
        before * PREEMPTION_STRIDE + one
        for before in range(max(0, preemptions - MAX_EARLIER_PREEMPTIONS), preemptions)
        for one in range(1, MAX_EARLIER + 1)
    ]
    own = range(max(1, number - MAX_EARLIER), number)
    attempts += [preemptions * PREEMPTION_STRIDE + one for one in own]
    return [episode_id(episode.group, episode.member, one) for one in attempts]


def _cut(earlier: Sequence[_Play], counted: _Play | None) -> list[_Play]:
    """Return the plays that preemptions cut.

    Of the plays whose last turn follows the same number of preemptions, the last one was cut if a later turn of the member follows more.

    The rollout role records with each turn how often the job had been preempted, so a sandbox cannot feign a preemption.

    Args:
        earlier: plays of a member without an Episode, in the order of their attempts.
        counted: its play that counts; None if that has no turn.
    """
    last = {play.last: play for play in earlier}
    until = max(last, default=0) if counted is None else counted.first
    return [play for number, play in last.items() if number < until]

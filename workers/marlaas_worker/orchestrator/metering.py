"""What episodes used, from the turns that the rollout role has recorded.

A sandbox's word counts only for the seconds of its episodes.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent
from marlaas_api.messages import Episode, TokenUse, Turn, UsageAmounts
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.usage import merged
from marlaas_api.names import JobRef, attempt_of, episode_id
from marlaas_api.wire import unpack
from marlaas_worker.orchestrator.experience import CompleteGroup

MAX_READS = 16
MAX_PLAYS = 4096
MAX_EARLIER = 32
"""Earlier attempts that are looked for, at most. A turn that waits raises the number of its attempt by many."""

AgentAmounts = dict[str, UsageAmounts]
"""Usage by agent."""

log = logging.getLogger(__name__)


class Metering:
    """Reads what the agents of a job used in its episodes. The methods raise errors of the bus.

    Seconds of an episode count for its job's agents in equal parts. What an agent used that plays another one's policy
    counts for that one.

    New turns are read many at a time, each once, and kept until their episode is counted. With more than `MAX_PLAYS`
    plays that are not counted, the turns of each episode are read on their own instead.
    """

    def __init__(self, bus: Bus, blobs: Blobs, ref: JobRef, agents: Sequence[AgentSettings]) -> None:
        self._bus, self._blobs, self._ref = bus, blobs, ref
        self._players = {agent.name: agent for agent in agents}
        self._reads = asyncio.Semaphore(MAX_READS)
        self._next_sequence = 1
        self._plays: dict[str, AgentAmounts] = {}
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

    async def _of_group(self, group: CompleteGroup) -> AgentAmounts:
        repeats = await asyncio.gather(*(self._of_play(one.episode) for one in group.repeats))
        amounts = await self._of_episodes(group.episodes)
        for repeated in repeats:
            amounts = merged(amounts, _settled(repeated, TokenUse.REPEATED))
        return self._by_policy(amounts)

    async def _of_episodes(self, episodes: Sequence[Episode]) -> AgentAmounts:
        """Return the usage of episodes that count, and of the attempts before each."""
        plays = [(one, one.episode) for one in episodes]
        earlier = [(one, name) for one in episodes for name in _earlier(one)]
        found = await asyncio.gather(*(self._of_play(name) for _, name in [*plays, *earlier]))
        part_s = sum(one.duration_s for one in episodes) / len(self._players)
        amounts = {agent: UsageAmounts(sandbox_s=part_s) for agent in self._players}
        for (one, name), play in zip([*plays, *earlier], found, strict=True):
            failed = one.fault is not None or name != one.episode
            amounts = merged(amounts, _settled(play, TokenUse.FAILED) if failed else play)
        return amounts

    async def _read_new(self) -> None:
        if self._is_too_large:
            return
        subject = subjects.turn(self._ref.namespace, self._ref.name, "*", "*")
        for stored in await self._bus.replay(subjects.TURNS, subject, self._next_sequence):
            turn = await self._turn(stored.data)
            if turn is not None:
                self._plays[turn.episode] = merged(self._plays.get(turn.episode, {}), self._used([turn]))
            self._next_sequence = max(self._next_sequence, stored.sequence + 1)
        if len(self._plays) > MAX_PLAYS:
            self._is_too_large = True
            self._plays.clear()

    async def _of_play(self, name: str) -> AgentAmounts:
        if not self._is_too_large:
            return self._plays.pop(name, {})
        subject = subjects.turn(self._ref.namespace, self._ref.name, name, "*")
        async with self._reads:
            stored = await self._bus.replay(subjects.TURNS, subject)
            turns = [await self._turn(one.data) for one in stored]
        return self._used([turn for turn in turns if turn is not None])

    def _by_policy(self, amounts: AgentAmounts) -> AgentAmounts:
        """Charge each agent's usage to the agent whose policy it plays. Tokens of past versions are never trained."""
        found: AgentAmounts = {}
        for name, used_ in amounts.items():
            player = self._players[name]
            own = used_.settled(TokenUse.FROZEN) if player.plays_past else used_
            found = merged(found, {player.policy_name: own})
        return found

    def _used(self, turns: Sequence[Turn]) -> AgentAmounts:
        agents = {turn.agent for turn in turns}
        return {name: used(one for one in turns if one.agent == name) for name in self._players if name in agents}

    async def _turn(self, data: bytes) -> Turn | None:
        """Return a turn; None if it cannot be read. Its tokens are then unrecorded."""
        try:
            message = await unpack(data, self._blobs)
        except Permanent as error:
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


def _earlier(episode: Episode) -> list[str]:
    """Return the names of attempts before an episode; not every one was made."""
    number = attempt_of(episode.episode)
    return [episode_id(episode.group, episode.member, one) for one in range(max(1, number - MAX_EARLIER), number)]

"""An agent's tokens by their use, computed from a copy of all turns and episodes and from its versions' manifests.

Shares no code with the orchestrator's metering.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from marlaas_api.messages import Episode, StepRecord, TokenUse, Turn
from marlaas_api.names import Split, attempt_of
from marlaas_api.wire import unpack_ids


@dataclass(frozen=True)
class Recorded:
    """All turns of an agent, and all episodes of its job. episodes: in the order of the stream; one may come twice."""

    agent: str
    turns: Sequence[Turn]
    episodes: Sequence[Episode]

    def sandbox_s(self, steps: Iterable[StepRecord], group_size: int) -> float:
        """Return the seconds of all decided groups in sandboxes: of each member, those of its first episode."""
        return sum(one.duration_s for _, members, _ in self._decided(steps, group_size) for one in members)

    def slot_s(self) -> float:
        """Return the seconds for which turns were in an engine, which its slots took at least: once for each version on a replica."""
        spans: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for turn in self.turns:
            spans[turn.version, turn.replica].append((turn.at - turn.meter.engine_s, turn.at))
        total = 0.0
        for found in spans.values():
            end = 0.0
            for start, at in sorted(found):
                total += max(0.0, at - max(start, end))
                end = max(end, at)
        return total

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all turns."""
        return self._plays().total()

    def by_use(self, steps: Iterable[StepRecord], consumed: Iterable[str], group_size: int) -> dict[TokenUse, int]:
        """Return the generated tokens of all decided groups by their use; OPEN: of plays that belong to none of them.

        Args:
            consumed: names of the groups that trained the agent.
        """
        plays = self._plays()
        trained, parts = set(consumed), Counter[TokenUse]()
        for name, members, repeats in self._decided(steps, group_size):
            use = self._use(name in trained, members)
            for one in repeats:
                parts[TokenUse.REPEATED] += plays.pop(one, 0)
            for one in members:
                parts[use if one.fault is None else TokenUse.FAILED] += plays.pop(one.episode, 0)
            for one in members:
                cut = self._cut(one)
                for play in self._earlier(one):
                    parts[TokenUse.PREEMPTED if play in cut else TokenUse.FAILED] += plays.pop(play, 0)
        parts[TokenUse.OPEN] = plays.total()
        return dict(parts)

    def prompts(self, steps: Iterable[StepRecord], group_size: int) -> tuple[int, int]:
        """Return the prompt tokens of all decided groups, and how many of them the engine took from its prefix cache.

        Those of plays that preemptions cut are left out.
        """
        names = set[str]()
        for _, members, repeats in self._decided(steps, group_size):
            names |= {
                *repeats,
                *(one.episode for one in members),
                *(play for one in members for play in self._earlier(one) if play not in self._cut(one)),
            }
        meters = [turn.meter for turn in self.turns if turn.episode in names]
        return sum(one.prompt_tokens for one in meters), sum(one.cached_tokens for one in meters)

    def _decided(self, steps: Iterable[StepRecord], group_size: int) -> Iterable[tuple[str, list[Episode], list[str]]]:
        """Yield the complete groups of evaluations, and those that finished steps have resolved; as `_groups`."""
        resolved = {index for step in steps for index in step.indices}
        for name, members, repeats in self._groups(group_size):
            if members[0].split is not Split.TRAIN or members[0].index in resolved:
                yield name, members, repeats

    def _plays(self) -> Counter[str]:
        """Return the generated tokens by play of a member."""
        plays = Counter[str]()
        for turn in self.turns:
            plays[turn.episode] += len(unpack_ids(turn.output_ids))
        return plays

    def _groups(self, size: int) -> Iterable[tuple[str, list[Episode], list[str]]]:
        """Yield complete groups: the first episode of each member, and the names of others that came before the last one."""
        members: dict[str, dict[int, Episode]] = defaultdict(dict)
        repeats: dict[str, list[str]] = defaultdict(list)
        for one in self.episodes:
            wanted = size if one.split is Split.TRAIN else 1
            found = members[one.group]
            if len(found) == wanted:
                continue
            if found.setdefault(one.member, one).episode != one.episode:
                repeats[one.group].append(one.episode)
            if len(found) == wanted:
                yield one.group, list(found.values()), repeats[one.group]

    def _earlier(self, one: Episode) -> list[str]:
        """Return the recorded plays of the same member before this one, in their order."""
        play, number = one.episode.removesuffix(str(attempt_of(one.episode))), attempt_of(one.episode)
        names = {turn.episode for turn in self.turns if turn.episode.startswith(play)}
        return sorted((name for name in names if attempt_of(name) < number), key=attempt_of)

    def _cut(self, one: Episode) -> set[str]:
        """Return the plays of the same member that preemptions cut: each the last one before turns after a further preemption."""
        known: dict[str, list[int]] = defaultdict(list)
        for turn in self.turns:
            known[turn.episode].append(turn.num_preemptions)
        plays = [play for play in [*self._earlier(one), one.episode] if play in known]
        return {play for play, after in pairwise(plays) if max(known[play]) < min(known[after])}

    def _use(self, is_trained: bool, members: Sequence[Episode]) -> TokenUse:
        if members[0].split is not Split.TRAIN:
            return TokenUse.EVALUATION
        if is_trained:
            return TokenUse.TRAINED
        rewards = [one.rewards[self.agent] for one in members if one.fault is None]
        return TokenUse.ZERO_VARIANCE if len(rewards) < 2 or len(set(rewards)) == 1 else TokenUse.STALE

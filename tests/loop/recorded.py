"""An agent's tokens by their use, computed from a copy of all turns and episodes and from its versions' manifests.

Shares no code with the orchestrator's metering.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from marlaas_api.messages import Episode, TokenUse, Turn
from marlaas_api.messages.job_spec import JobSpec
from marlaas_api.names import Split, attempt_of
from marlaas_api.wire import unpack_ids


@dataclass(frozen=True)
class Recorded:
    """All turns of an agent, and all episodes of its job, in the order of their streams. An episode may come twice."""

    agent: str
    spec: JobSpec
    turns: Sequence[Turn]
    episodes: Sequence[Episode]

    def sandbox_s(self, steps):
        """Return the seconds of all decided groups in sandboxes: of each member, those of its first episode."""
        return sum(one.duration_s for _, members, _ in self._decided(steps) for one in members)

    def slot_s(self):
        """Return the seconds for which slots were in use at least: of each version on a replica, its longest turn in the engine."""
        longest: dict[object, float] = defaultdict(float)
        for turn in self.turns:
            held = turn.version, turn.replica
            longest[held] = max(longest[held], turn.meter.engine_s)
        return sum(longest.values())

    @property
    def num_tokens(self):
        """Generated tokens of all turns."""
        return sum(len(unpack_ids(turn.output_ids)) for turn in self.turns)

    def check(self, counted, steps, consumed):
        """Assert that each turn counts once by its use. One that was recorded after its group was decided may be missing."""
        certain, late = self.by_use(steps, consumed)
        num_open = certain.pop(TokenUse.OPEN, 0)
        assert num_open + certain.total() <= num_open + counted.generated_tokens <= self.num_tokens
        for use in TokenUse:
            assert certain[use] <= getattr(counted, use.value) <= certain[use] + late[use], use
        prompts, late_prompts = self.prompts(steps)
        for name in ("prompt_tokens", "cached_tokens"):
            assert prompts[name] <= getattr(counted, name) <= prompts[name] + late_prompts[name], name

    def by_use(self, steps, consumed):
        """Return the generated tokens by their use: those that count, and those that were recorded so late that they may count.

        OPEN: of plays that belong to no decided group.

        Args:
            consumed: names of the groups that trained the agent.
        """
        certain, late = Counter[TokenUse](), Counter[TokenUse]()
        for turn, use, is_late in self._used(steps, consumed):
            (late if is_late else certain)[use] += len(unpack_ids(turn.output_ids))
        return certain, late

    def prompts(self, steps):
        """Return the prompt tokens of all decided groups and those from the prefix cache, as `by_use`.

        Those of plays that preemptions cut are left out.
        """
        certain, late = Counter[str](), Counter[str]()
        for turn, use, is_late in self._used(steps, ()):
            if use not in (TokenUse.OPEN, TokenUse.PREEMPTED):
                found = late if is_late else certain
                found += Counter(prompt_tokens=turn.meter.prompt_tokens, cached_tokens=turn.meter.cached_tokens)
        return certain, late

    def _used(self, steps, consumed):
        """Yield each turn with the use of its tokens, and whether its group may have been decided before it was recorded.

        That cannot be before the last turn of the plays that count.
        """
        trained, uses, until = set(consumed), dict[str, TokenUse](), dict[str, int]()
        places = {turn.episode: place for place, turn in enumerate(self.turns)}
        for name, members, repeats in self._decided(steps):
            use, own = self._use(name in trained, members), [one.episode for one in members]
            cut = {play for one in members for play in self._cut(one)}
            earlier = [play for one in members for play in self._earlier(one)]
            uses |= {play: TokenUse.PREEMPTED if play in cut else TokenUse.FAILED for play in earlier}
            uses |= {one.episode: use if one.fault is None else TokenUse.FAILED for one in members}
            uses |= dict.fromkeys(repeats, TokenUse.REPEATED)
            last = max(places.get(play, -1) for play in own)
            until |= dict.fromkeys({*earlier, *repeats} - {*own}, last)
        for place, turn in enumerate(self.turns):
            yield turn, uses.get(turn.episode, TokenUse.OPEN), place > until.get(turn.episode, place)

    def _decided(self, steps):
        """Yield the complete groups of evaluations, and those that finished steps have resolved; as `_groups`."""
        resolved = {index for step in steps for index in step.indices}
        for name, members, repeats in self._groups():
            if members[0].split is not Split.TRAIN or members[0].index in resolved:
                yield name, members, repeats

    def _groups(self):
        """Yield complete groups: the first episode of each member, and the names of others that came before the last one."""
        members: dict[str, dict[int, Episode]] = defaultdict(dict)
        repeats: dict[str, list[str]] = defaultdict(list)
        for one in self.episodes:
            wanted = self.spec.rollout.group_size
            if one.split is not Split.TRAIN:
                wanted = self.spec.evaluation.at(one.index)[0].samples
            found = members[one.group]
            if len(found) == wanted:
                continue
            if found.setdefault(one.member, one).episode != one.episode:
                repeats[one.group].append(one.episode)
            if len(found) == wanted:
                yield one.group, list(found.values()), repeats[one.group]

    def _earlier(self, one):
        """Return the recorded plays of the same member before this one, in their order."""
        play, number = one.episode.removesuffix(str(attempt_of(one.episode))), attempt_of(one.episode)
        names = {turn.episode for turn in self.turns if turn.episode.startswith(play)}
        return sorted((name for name in names if attempt_of(name) < number), key=attempt_of)

    def _cut(self, one):
        """Return the plays of the same member that preemptions cut: each the last one before turns after a further preemption."""
        known: dict[str, list[int]] = defaultdict(list)
        for turn in self.turns:
            known[turn.episode].append(turn.num_preemptions)
        plays = [play for play in [*self._earlier(one), one.episode] if play in known]
        return {play for play, after in pairwise(plays) if max(known[play]) < min(known[after])}

    def _use(self, is_trained, members):
        if members[0].split is not Split.TRAIN:
            return TokenUse.EVALUATION
        if is_trained:
            return TokenUse.TRAINED
        rewards = [one.rewards[self.agent] for one in members if one.fault is None]
        return TokenUse.ZERO_VARIANCE if len(rewards) < 2 or len(set(rewards)) == 1 else TokenUse.STALE

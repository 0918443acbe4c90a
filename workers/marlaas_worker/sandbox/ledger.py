"""The supervisor's own record of one play: it checks and counts the turns, choices and rewards that the child reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import Choice, Ending, StopReason, TurnReward
from marlaas_api.names import BRANCH_TURNS, MAX_TURNS_FACTOR, digest_of, turn_number
from marlaas_worker.sandbox.child_messages import ScoreMessage, TurnMessage


class BadChildMessage(Exception):
    """A child sent a malformed message, or one that is not valid in this state."""


@dataclass(slots=True)
class TurnLedger:
    """Record of one play of an episode: its turns, its choices (several replies of an agent from one state), and their rewards.

    A turn is named by its agent and its number among the agent's own turns.

    Attributes:
        agents: all agents of the job, in the manifest's order.
        max_turns: limit of the turns of one agent (`rollout.maxTurns`).
        may_speak: the agents that the task may call; empty: all.
        tool_rewards: each agent's reward so far, while a tool call is open; else None.
        num_tokens: tokens generated so far; in a demonstrated task, tokens of the demonstrated replies that are trained.
        num_cut: turns whose reply maxTokens, the model's context length or the time limit cut.
        num_overtime: turns that the time limit cut.
    """

    agents: tuple[str, ...]
    max_turns: int
    may_speak: tuple[str, ...] = ()
    tool_rewards: dict[str, float] | None = None
    num_tokens: int = 0
    num_cut: int = 0
    num_overtime: int = 0
    _first: str = ""
    _parents: dict[str, dict[int, int | None]] = field(default_factory=dict)
    _begun: set[tuple[str, int]] = field(default_factory=set)
    _last: TurnMessage | None = None
    _last_stop: StopReason | None = None
    _was_limited: bool = False
    _choices: dict[int, list[TurnMessage]] = field(default_factory=dict)
    _rewards: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _turn_rewards: dict[tuple[str, int], float] = field(default_factory=dict)

    def limit(self, agents: Sequence[str]) -> None:
        """Set the agents that the task may call. Raises BadChildMessage after the first turn."""
        if self._begun:
            raise BadChildMessage("the agents that the task may call are named after its first turn")
        self.may_speak = tuple(agents)

    @property
    def num_turns(self) -> int:
        """Number of turns that have ended, demonstrated ones included."""
        return sum(map(len, self._parents.values()))

    @property
    def has_begun(self) -> bool:
        """Whether any turn has begun."""
        return bool(self._begun)

    def begin(self, asked: TurnMessage) -> bool:
        """Record that a turn begins and return True; return False, and record no turn, if `num_before` of the request has reached `max_turns`.

        Raises:
            BadChildMessage: the number was used before or does not follow the parent's, the parent turn does not exist, the task
                may not call the agent, the agent has had too many turns in parts that run at the same time, or the candidates of a
                choice are of different agents or follow different turns.
        """
        if self.may_speak and asked.agent not in self.may_speak:
            raise BadChildMessage(f"a turn of agent {asked.agent!r}, which the task may not call")
        own, name = self._parents.get(asked.agent, {}), (asked.agent, asked.number)
        if asked.parent is not None and asked.parent not in own:
            raise BadChildMessage(f"agent {asked.agent!r} continues turn {asked.parent}, which is not one of its turns")
        follows = asked.parent is None or asked.parent < asked.number
        in_branch = asked.number % BRANCH_TURNS
        if name in self._begun or not follows or not in_branch <= asked.num_before:
            raise BadChildMessage(f"agent {asked.agent!r} names its turn {asked.number}, after turn {asked.parent}")
        most = MAX_TURNS_FACTOR * self.max_turns
        if sum(agent == asked.agent for agent, _ in self._begun) >= most:
            raise BadChildMessage(
                f"agent {asked.agent!r} has had {most} turns in parts that run at the same time, {MAX_TURNS_FACTOR} times rollout.maxTurns"
            )
        if asked.choice is not None and not all(_is_beside(asked, one) for one in self._choices.get(asked.choice, ())):
            raise BadChildMessage(f"choice {asked.choice} has candidates of different agents or after different turns")
        has_turn = asked.num_before < self.max_turns
        self._was_limited |= not has_turn and not asked.is_measured
        if has_turn:
            self._first = self._first or digest_of(repr(asked.append), repr(asked.tools))
            self._begun.add(name)
        return has_turn

    def prompt(self, content: str) -> str:
        """Return a digest of the first prompt and of `ScoreMessage.content`, what the task has drawn; empty if there was no turn."""
        return digest_of(self._first, content) if self._first else ""

    def end(self, asked: TurnMessage, stop: StopReason, num_tokens: int = 0, *, is_overtime: bool = False) -> None:
        """Record the end of a turn.

        Args:
            asked: the request for the turn, as given to `begin`.
            stop: why the reply ended.
            num_tokens: tokens of the reply.
            is_overtime: the time limit cut the reply.
        """
        self.num_tokens += 0 if asked.is_measured else num_tokens
        self.num_cut += stop in (StopReason.LENGTH, StopReason.CONTEXT)
        self.num_overtime += is_overtime
        self._parents.setdefault(asked.agent, {})[asked.number] = asked.parent
        if asked.choice is not None:
            self._choices.setdefault(asked.choice, []).append(asked)
        if self._last is None or _is_later(asked, self._last):
            self._last, self._last_stop = asked, stop

    def number(self, agent: str, own: int) -> int:
        """Return a turn's number in the episode (`names.turn_number`).

        agent: the turn's agent. own: number of the turn among the agent's own.
        """
        return turn_number(own, self.agents.index(agent), len(self.agents))

    def reward(self, score: ScoreMessage) -> None:
        """Record the rewards of turns, and of all candidates.

        Raises BadChildMessage: a turn reward of a turn that does not exist or is a candidate, or not one reward for each candidate.
        """
        candidates = {(one.agent, one.number) for asked in self._choices.values() for one in asked}
        for turn in score.turn_rewards:
            name = turn.agent, turn.turn
            if turn.turn not in self._parents.get(turn.agent, {}) or name in candidates:
                raise BadChildMessage(f"a reward of turn {turn.turn} of agent {turn.agent!r}, which has no such turn")
            self._turn_rewards[name] = turn.reward
        for choice in score.choices:
            if len(choice.rewards) != len(self._choices.get(choice.number, ())):
                raise BadChildMessage(f"{len(choice.rewards)} rewards for the candidates of choice {choice.number}")
            self._rewards[choice.number] = tuple(choice.rewards)

    def choices(self) -> tuple[Choice, ...]:
        """Return the choices (several replies of an agent from one state), ordered by their turns' numbers in the episode.

        A choice has no rewards if the child has reported none.
        """
        found = [
            Choice(
                agent=asked[0].agent,
                turns=tuple(sorted(self.number(one.agent, one.number) for one in asked)),
                rewards=self._rewards.get(number, ()),
                parent=None if asked[0].parent is None else self.number(asked[0].agent, asked[0].parent),
            )
            for number, asked in self._choices.items()
        ]
        return tuple(sorted(found, key=lambda choice: choice.turns))

    def turn_rewards(self) -> dict[str, tuple[TurnReward, ...]]:
        """Return, per agent with turns, the reward of each turn that is no candidate, in the order of the turns; 0 if none was set."""
        candidates = {(one.agent, one.number) for asked in self._choices.values() for one in asked}
        return {
            agent: tuple(
                TurnReward(turn=self.number(agent, number), reward=self._turn_rewards.get((agent, number), 0.0))
                for number in sorted(own)
                if (agent, number) not in candidates
            )
            for agent in self.agents
            if (own := self._parents.get(agent))
        }

    def leaves(self) -> dict[str, tuple[int, ...]]:
        """Return, per agent with turns, the numbers of its turns that are no other turn's parent."""
        found: dict[str, tuple[int, ...]] = {}
        for agent in self.agents:
            own = self._parents.get(agent, {})
            parents = set(own.values())
            if own:
                found[agent] = tuple(self.number(agent, number) for number in sorted(own) if number not in parents)
        return found

    def ending(self, score: ScoreMessage) -> Ending:
        """Return the episode's ending: tool error, turn limit, token limit, or completed."""
        reported = Ending(score.ending)
        if reported is not Ending.COMPLETED:
            return reported
        if self._was_limited:
            return Ending.MAX_TURNS
        if self._last_stop in (StopReason.LENGTH, StopReason.CONTEXT):
            return Ending.MAX_TOKENS
        return reported


def _is_beside(one: TurnMessage, other: TurnMessage) -> bool:
    """Return whether two turns are of the same agent and follow the same turn."""
    return (one.agent, one.parent) == (other.agent, other.parent)


def _is_later(one: TurnMessage, last: TurnMessage) -> bool:
    """Return whether a turn that has just ended comes after `last`, the episode's last turn so far.

    A turn of a higher branch (part of the episode that may run at the same time as others) is later. In one branch, the turns of one
    agent are ordered by their numbers. So the order does not depend on which branch runs faster. Turns of different agents in one branch
    are ordered by when they end; they run at the same time only in an asynchronous job.
    """
    branches = one.number // BRANCH_TURNS, last.number // BRANCH_TURNS
    if branches[0] == branches[1] and one.agent == last.agent:
        return one.number > last.number
    return branches[0] >= branches[1]

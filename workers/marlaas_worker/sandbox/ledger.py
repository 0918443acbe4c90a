"""Messages from a child to the supervisor, and the supervisor's record of one play (`TurnLedger`).

A child runs foreign code. So `parse` validates each message, and the ledger checks it against the turns so far. The ledger
counts turns and tokens itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from marlaas.scores import MAX_DATA, MAX_METRIC_NAME, MAX_METRICS, MAX_NUMBER
from marlaas_api.messages import ChatMessage, Choice, Ending, StopReason, TurnReward
from marlaas_api.messages.turns import StopText
from marlaas_api.names import (
    BRANCH_TURNS,
    MAX_BRANCHES,
    MAX_STOPS,
    MAX_TURNS_FACTOR,
    digest_of,
    is_measured,
    turn_number,
)
from marlaas_api.numeric import LARGEST_INTEGER


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"the name {name!r} has characters that cannot be printed")
    return name


_Number = Annotated[FiniteFloat, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Rewards = dict[str, _Number]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME), AfterValidator(_printable)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TurnMessage(_Message):
    """Request for a turn of an agent.

    Attributes:
        agent: name of the agent.
        number: number of the turn among the agent's own turns (`names.turn_number`).
        num_before: turns that the agent had before this one; those in branches that run at the same time do not count.
        parent: number of the agent's turn that this one follows; None begins a conversation.
        append: messages after the parent's reply, or raw text.
        max_tokens: limit of the reply; None: the job's.
        tools: JSON text of each function that the chat template shows; None: those of the parent.
        choice: number of the choice of which the reply is one candidate (one of several replies from one state); None: of no choice.
        stop: strings that end the reply.
        demonstration: the reply itself, if the task is demonstrated; None: the agent's policy samples the reply.
    """

    kind: Literal["turn"]
    agent: str
    number: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    num_before: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    parent: Annotated[int, Field(ge=0)] | None
    append: Annotated[str, Field(min_length=1)] | Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | None
    tools: list[str] | None = None
    choice: Annotated[int, Field(ge=0, lt=MAX_BRANCHES)] | None = None
    stop: Annotated[list[StopText], Field(max_length=MAX_STOPS)] = []
    demonstration: ChatMessage | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the turn is of a held-out demonstration, which is measured and not trained."""
        return self.demonstration is not None and is_measured(self.number, 1)


class AgentsMessage(_Message):
    """Names of the agents that the task may call; sent before the first turn. Without this message, the task may call all agents."""

    kind: Literal["agents"]
    agents: list[str]


class ToolMessage(_Message):
    """Start or end of a tool call.

    is_open: True at the start, False at the end. rewards: each agent's reward so far, by name.
    """

    kind: Literal["tool"]
    is_open: bool
    rewards: _Rewards


class ChoiceMessage(_Message):
    """Rewards of one choice. Its candidates are several replies of an agent from one state.

    number: of the choice. rewards: one for each candidate, in the order of the candidates' turns.
    """

    number: Annotated[int, Field(ge=0, lt=MAX_BRANCHES)]
    rewards: list[_Number]


class TurnRewardMessage(_Message):
    """Reward of one turn. agent: its agent's name. turn: its number among that agent's turns."""

    agent: str
    turn: Annotated[int, Field(ge=0, lt=(1 + MAX_BRANCHES) * BRANCH_TURNS)]
    reward: _Number


class ScoreMessage(_Message):
    """Result of an episode that the environment has scored.

    Attributes:
        rewards: reward of each agent, by name.
        metrics: the environment's metrics, by name.
        ending: how the episode ended, as the environment sees it; `TurnLedger.ending` corrects it.
        tool_s: seconds in tool calls.
        tool_error: text of the ToolError that ended the episode; empty: none.
        content: digest of the contents that the task has drawn (`Task.drawn`); empty if it has drawn none.
        answer: digest of the policy's answer; empty: none.
        choices: rewards of the candidates of each choice.
        turn_rewards: rewards of single turns.
        compared_by: JSON text of `Score.data`, if the environment compares the episodes of a group; else None.
    """

    kind: Literal["score"]
    rewards: _Rewards
    metrics: Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS + 1)]  # with `REPLACED`
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: Annotated[FiniteFloat, Field(ge=0)]
    tool_error: str = ""
    content: Annotated[str, Field(max_length=64)] = ""
    answer: Annotated[str, Field(max_length=64)] = ""
    choices: Annotated[list[ChoiceMessage], Field(max_length=MAX_BRANCHES)] = []
    turn_rewards: list[TurnRewardMessage] = []
    compared_by: Annotated[str, Field(max_length=MAX_DATA)] | None = None


class UnscoredMessage(_Message):
    """End of an episode to which the environment gave no reward."""

    kind: Literal["unscored"]


class ComparedMessage(_Message):
    """Result of the comparison of a group's episodes.

    scores: for each episode, in the order of the request, its rewards by agent and its metrics by name.
    """

    kind: Literal["compared"]
    scores: list[tuple[_Rewards, Annotated[dict[_Name, _Number], Field(max_length=MAX_METRICS + 1)]]]


class FaultMessage(_Message):
    """Report of an exception that ended the episode or the comparison.

    Attributes:
        text: the error, for people.
        is_permanent: playing again cannot help.
        is_infra: a service that the environment calls has failed.
    """

    kind: Literal["fault"]
    text: str
    is_permanent: bool = False
    is_infra: bool = False


ChildMessage = (
    AgentsMessage | TurnMessage | ToolMessage | ScoreMessage | UnscoredMessage | ComparedMessage | FaultMessage
)
_CHILD_MESSAGES: TypeAdapter[ChildMessage] = TypeAdapter(Annotated[ChildMessage, Field(discriminator="kind")])


class BadChildMessage(Exception):
    """A child sent a malformed message, or one that is not valid in this state."""


def parse(body: bytes, agents: tuple[str, ...]) -> ChildMessage:
    """Parse and validate one message of a child. agents: names of the agents that environments may call. Raises BadChildMessage."""
    try:
        message = _CHILD_MESSAGES.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadChildMessage(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
    if isinstance(message, TurnMessage) and message.agent not in agents:
        raise BadChildMessage(f"a turn of agent {message.agent!r}, but the job's agents are {', '.join(agents)}")
    if isinstance(message, AgentsMessage) and (unknown := set(message.agents) - set(agents)):
        raise BadChildMessage(f"the task may call {min(unknown)!r}, but the job's agents are {', '.join(agents)}")
    if isinstance(message, AgentsMessage) and len(set(message.agents)) < len(message.agents):
        raise BadChildMessage(f"the task may call {', '.join(message.agents)}: one of them twice")
    if isinstance(message, ToolMessage | ScoreMessage) and set(message.rewards) != set(agents):
        found = ", ".join(message.rewards) or "no agent"
        raise BadChildMessage(f"rewards for {found}; expected {', '.join(agents)}")
    return message


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
            BadChildMessage: the turn's number was used before or is not above its parent's; `num_before` is too small for the
                number; the parent does not exist; the task may not call the agent; the agent has too many turns in concurrent
                parts; or candidates of one choice differ in agent or parent.
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

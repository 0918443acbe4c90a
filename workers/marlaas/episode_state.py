"""State that the agents of an episode share: the channel to their policies, rewards, time in tools, and the order of turns."""

import contextlib
import math
import time
from _thread import allocate_lock, get_ident  # without `threading`, a fork copies a hundred pages less
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from marlaas.branches import Branch, Together, at_once
from marlaas.chat_messages import encodable, encodable_append
from marlaas.environment_types import Channel, InvalidTurn, Reply, TurnLimit, TurnRequest
from marlaas.scores import number
from marlaas_api.errors import InvalidInput
from marlaas_api.names import MAX_BRANCHES

ARBITRARY = (
    "the order of turns, and with it their seeds, would be arbitrary, and maxStaleness 0 promises exact results; "
    "speak in the parts of `agents.together()`, which have an order"
)


class Rewarded(Protocol):
    """A candidate of a choice."""

    reward: float

    def is_turn(self, agent: str, turn: int) -> bool:
        """Return whether this is a certain turn of an agent."""
        ...


OpenTurn = Callable[[], Reply]
"""A turn that has begun, so that its number is fixed. Called once, it is generated; raises TurnLimit."""


class EpisodeState:
    """State that the agents of an episode share: channel, sampling temperature, rewards so far, and seconds spent in tools.

    Args:
        is_strict: the job's steps must depend on nothing but its seeds, so only the thread or task of `play` and declared
            branches may speak, each of them one turn at a time.
        in_order: parts run one after another, because one person or script speaks for all agents.

    Attributes:
        rewards: of the agents so far, without those of turns. is_rewarded: one of them, or that of a turn or a candidate, was set.
        turn_rewards: by agent and number of the turn.
        may_speak: the agents that the task calls.
        choices: by number, the candidates of each choice.
        is_spoken_apart: a turn was asked for in a thread or task that the episode does not know, which a strict job refuses.
        num_replaced: requests in which a lone surrogate, which no tokenizer takes, was replaced.
        tool_s: seconds in tools, without the time that turns within a tool call take.
    """

    def __init__(
        self,
        names: Iterable[str],
        channel: Channel,
        temperature: float = 1.0,
        *,
        is_strict: bool = False,
        in_order: bool = False,
    ) -> None:
        self.rewards = dict.fromkeys(names, 0.0)
        self.turn_rewards: dict[tuple[str, int], float] = {}
        self.is_rewarded = False
        self.may_speak = frozenset(self.rewards)
        self.choices: dict[int, Sequence[Rewarded]] = {}
        self.temperature = temperature
        self.is_strict, self.in_order = is_strict, in_order
        self.num_replaced = 0
        self.is_spoken_apart = False
        self.tool_s = 0.0
        self._channel = channel
        self._waited_s = 0.0
        self._num_tools = 0
        self._lock = allocate_lock()
        self._branches: dict[object, Branch] = {}
        self._main_line = Branch(0, 0, {})
        self._parts: list[Branch] = []
        self._raw: set[tuple[str, int | None]] = set()
        self._num_branches = self._num_blocks = self._num_choices = 0
        self._is_apart = False
        self.be_called_by(get_ident, "thread")

    def be_called_by(self, caller: Callable[[], object], kind: str) -> None:
        """Set how a caller is identified: by its thread, or by its task. The present caller is that of the main line."""
        self._caller, self._main, self._kind = caller, caller(), kind

    def limit(self, agents: Iterable[str]) -> None:
        """Set the agents that the task may call, and report them to the channel if they are not all."""
        self.may_speak = frozenset(agents)
        if len(self.may_speak) < len(self.rewards):
            self._channel.may_call([name for name in self.rewards if name in self.may_speak])

    def reward(self, name: str, value: float) -> None:
        """Set an agent's reward. Raises InvalidScore."""
        self.rewards[name] = number(value, f"the reward of {name!r}")
        self.is_rewarded = True

    def reward_turn(self, name: str, turn: int, value: float) -> None:
        """Set the reward of one of an agent's turns. Raises InvalidScore."""
        self.turn_rewards[name, turn] = number(value, f"the reward of turn {turn} of {name!r}")
        self.is_rewarded = True

    def with_turns(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """Return rewards by agent, with the rewards of its turns added."""
        own: dict[str, list[float]] = {name: [reward] for name, reward in rewards.items()}
        for (name, _), reward in self.turn_rewards.items():
            own[name].append(reward)
        return {name: math.fsum(parts) for name, parts in own.items()}

    def turn(self, request: TurnRequest) -> Reply:
        """Have the caller's next turn generated. Raises TurnLimit."""
        (turn,) = self.begin(request)
        return turn()

    def begin(self, request: TurnRequest, num: int = 1) -> list[OpenTurn]:
        """Begin the caller's next turn, or several that have the same request: all are within the turn limit, or none is.

        Turns of callers that are not declared belong to the main line; they may be open at the same time unless the job is strict.
        """
        branch = self.branch()
        self.is_spoken_apart |= branch is None
        if branch is None and self.is_strict:
            raise InvalidInput(f"an agent was spoken to in a {self._kind} that the episode does not know: {ARBITRARY}")
        return self._begin(request, num, branch or self._main_line)

    def generate(self, turns: Sequence[OpenTurn]) -> list[Reply]:
        """Have turns that have begun generated at the same time. Raises TurnLimit."""
        return [turn() for turn in turns] if self.in_order else at_once(turns)

    def begin_served(self, request: TurnRequest, num: int, opened_in: Branch | None) -> list[OpenTurn]:
        """As `begin`, for a server. Its turns belong to the part in which it was opened while that runs, else to the main line."""
        part = opened_in if any(opened_in is one for one in self._parts) else None
        return self._begin(request, num, part or self._main_line)

    def _begin(self, request: TurnRequest, num: int, branch: Branch) -> list[OpenTurn]:
        agent = request.agent
        if agent not in self.may_speak:
            raise InvalidInput(f"agent {agent!r} was called, but `agents_of` does not name it for this task")
        with self._lock:
            if self._is_apart and not branch.block:
                raise InvalidInput(
                    "within `together`, agents are spoken to in its parts: `at_once.run(agents.solver.say, …)`"
                )
            if self.is_strict and branch.num_open:
                raise InvalidInput(f"two turns were asked for at the same time: {ARBITRARY}")
            is_raw = (agent, request.parent) in self._raw or (
                request.parent is None and isinstance(request.append, str)
            )
            if is_raw and not isinstance(request.append, str):
                raise InvalidTurn(
                    f"agent {agent!r}: this conversation began as raw text and cannot go on as chat: append text, or begin a new conversation"
                )
            numbers, before = branch.take(agent, num)
            self._raw.update((agent, one) for one in numbers if is_raw)
            request = self._encodable(request)
        requests = (replace(request, number=number, num_before=before) for number in numbers)
        return [partial(self._generate, one, branch) for one in requests]

    def _encodable(self, request: TurnRequest) -> TurnRequest:
        """Return the request with texts that UTF-8 can encode. Count a request whose texts were changed."""
        tools = None if request.tools is None else tuple(encodable(tool) for tool in request.tools)
        changed = replace(request, append=encodable_append(request.append), tools=tools)
        if request.demonstration is not None:
            given = encodable_append((request.demonstration,))
            assert not isinstance(given, str)
            changed = replace(changed, demonstration=given[0])
        self.num_replaced += changed != request
        return changed

    def _generate(self, request: TurnRequest, branch: Branch) -> Reply:
        started, is_taken = time.monotonic(), True
        try:
            return self._channel.turn(request)
        except TurnLimit:
            is_taken = False
            raise
        finally:
            with self._lock:
                branch.end(request.agent, request.number, is_taken=is_taken)
                self._waited_s += time.monotonic() - started

    def branch(self) -> Branch | None:
        """Return the branch of the calling thread or task; None if the caller is unknown."""
        caller = self._caller()
        return self._branches.get(caller) or (self._main_line if caller == self._main else None)

    @property
    def may_divide(self) -> bool:
        """Whether the caller may open a context in which parts run at the same time."""
        own = self.branch()
        return own is not None and not own.block and not self._is_apart

    def begin_choice(self) -> int:
        """Return the number of a new choice between candidates."""
        with self._lock:
            self._num_choices += 1
            return self._num_choices - 1

    @contextlib.contextmanager
    def together(self, *, is_choice: bool = False) -> Iterator[Together]:
        """Open a context in which parts of the episode run at the same time, each in a thread. is_choice: see `Branch.after`."""
        block = Together(self, self.open_block())
        try:
            yield block
        finally:
            block.join()
            self.close_block(is_choice=is_choice)
        block.finish()

    def open_block(self) -> int:
        """Begin a block of parts that run at the same time; return its number, from 1."""
        if not self.may_divide:
            raise InvalidInput("`together` within a part that already runs at the same time as others is not supported")
        self._num_blocks, self._is_apart = self._num_blocks + 1, True
        return self._num_blocks

    def close_block(self, *, is_choice: bool) -> None:
        """Go on with the main line after all parts of the block have ended. is_choice: see `Branch.after`."""
        # Later turns have larger numbers than those that they follow.
        self._main_line = self._new_branch(0, self._main_line.after(self._parts, is_choice=is_choice))
        self._is_apart, self._parts = False, []

    def begin_branch(self, block: int) -> Branch:
        """Return a new part of a block, with turn numbers of its own. Raises InvalidInput beyond MAX_BRANCHES, and within a part."""
        own = self.branch()
        if own is None or own.block:
            raise InvalidInput("`run` within a part is not supported: start all parts where the block was opened")
        part = self._new_branch(block, self._main_line.after())
        self._parts.append(part)
        return part

    def begin_apart(self) -> None:
        """Go on with the main line in a branch of its own, in which no earlier turn counts against the turn limit."""
        self._main_line = self._new_branch(0, {})

    def _new_branch(self, block: int, before: dict[str, int]) -> Branch:
        if self._num_branches >= MAX_BRANCHES:
            raise InvalidInput(f"an episode has at most {MAX_BRANCHES} parts that run at the same time as others")
        self._num_branches += 1
        return Branch(block, self._num_branches, before)

    def enter(self, branch: Branch | None) -> None:
        """Make a branch the one of the calling thread or task; None: forget the caller."""
        with self._lock:
            if branch is None:
                self._branches.pop(self._caller(), None)
            else:
                self._branches[self._caller()] = branch

    @contextlib.contextmanager
    def tool_call(self) -> Iterator[None]:
        """Measure the time of a tool call and report its begin and end to the channel. Calls that overlap count once."""
        with self._lock:
            self._num_tools += 1
            is_first = self._num_tools == 1
            if is_first:
                self._channel.tool(True, self.with_turns(self.rewards))
                self._tool_began, self._waited_before_s = time.monotonic(), self._waited_s
        try:
            yield
        finally:
            with self._lock:
                self._num_tools -= 1
                if self._num_tools == 0:
                    waited_s = self._waited_s - self._waited_before_s
                    self.tool_s += max(0.0, time.monotonic() - self._tool_began - waited_s)
                    self._channel.tool(False, self.with_turns(self.rewards))

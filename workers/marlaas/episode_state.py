"""State that the agents of an episode share: the channel to their policies, rewards, time in tools, and the order of turns."""

import contextlib
import time
from _thread import allocate_lock, get_ident  # without `threading`, a fork copies a hundred pages less
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from marlaas.branches import Branch, Together
from marlaas.environment_types import Channel, Reply, TurnLimit, TurnRequest
from marlaas_api.errors import InvalidInput
from marlaas_api.names import MAX_BRANCHES

_ARBITRARY = (
    "the order of turns, and with it their seeds, would be arbitrary, and maxStaleness 0 promises exact results; "
    "use `with agents.together() as at_once: at_once.run(…)`"
)


class Rewarded(Protocol):
    """A candidate of a choice."""

    reward: float


class EpisodeState:
    """State that the agents of an episode share: channel, sampling temperature, rewards so far, and seconds spent in tools.

    `may_speak`: the agents that the task calls. `choices`: by number, the candidates of each choice. `tool_s` excludes the time that turns within a tool call take. `is_strict`: the job's steps must depend on nothing but its
    seeds, so only the thread of `play` and declared branches may speak.
    """

    def __init__(
        self, names: Iterable[str], channel: Channel, temperature: float = 1.0, *, is_strict: bool = False
    ) -> None:
        self.rewards = dict.fromkeys(names, 0.0)
        self.may_speak = frozenset(self.rewards)
        self.choices: dict[int, Sequence[Rewarded]] = {}
        self.temperature = temperature
        self.tool_s = 0.0
        self._channel = channel
        self._is_strict = is_strict
        self._waited_s = 0.0
        self._num_tools = 0
        self._lock, self._one_at_a_time = allocate_lock(), allocate_lock()
        self._main = get_ident()
        self._branches: dict[int, Branch] = {}
        self._main_line = Branch(0, 0, {})
        self._parts: list[Branch] = []
        self._num_branches = self._num_blocks = self._num_choices = 0
        self._is_apart = False

    def limit(self, agents: Iterable[str]) -> None:
        """Set the agents that the task may call, and report them to the channel if they are not all."""
        self.may_speak = frozenset(agents)
        if len(self.may_speak) < len(self.rewards):
            self._channel.may_call([name for name in self.rewards if name in self.may_speak])

    def turn(self, request: TurnRequest, *, in_any_thread: bool = False) -> Reply:
        """Request a turn from the channel. Raises TurnLimit.

        Turns run one at a time, so that they have an order, except those of branches that were declared (`together`).

        Args:
            in_any_thread: the caller answers for the order of the turns.
        """
        if request.agent not in self.may_speak:
            raise InvalidInput(f"agent {request.agent!r} was called, but `agents_of` does not name it for this task")
        branch = self.branch()
        if branch is None and self._is_strict and not in_any_thread:
            raise InvalidInput(f"an agent was spoken to in a thread that the episode does not know: {_ARBITRARY}")
        if branch is not None and branch.block:
            return self._turn(request, branch)
        if self._is_apart:
            raise InvalidInput(
                "within `together`, agents are spoken to in its parts: `at_once.run(agents.solver.say, …)`"
            )
        if not self._one_at_a_time.acquire(blocking=not self._is_strict):
            raise InvalidInput(f"two turns were asked for at the same time: {_ARBITRARY}")
        try:
            return self._turn(request, self._main_line)
        finally:
            self._one_at_a_time.release()

    def branch(self) -> Branch | None:
        """Return the branch of the calling thread; None if the thread is unknown."""
        return self._branches.get(get_ident()) or (self._main_line if get_ident() == self._main else None)

    @property
    def may_divide(self) -> bool:
        """Whether the calling thread may open a context in which parts run at the same time."""
        own = self.branch()
        return own is not None and not own.block and not self._is_apart

    def begin_choice(self) -> int:
        """Return the number of a new choice between candidates."""
        with self._lock:
            self._num_choices += 1
            return self._num_choices - 1

    @contextlib.contextmanager
    def together(self, *, is_choice: bool = False) -> Iterator[Together]:
        """Open a context in which parts of the episode run at the same time. is_choice: see `Branch.after`."""
        if not self.may_divide:
            raise InvalidInput("`together` within a part that already runs at the same time as others is not supported")
        self._num_blocks, self._is_apart = self._num_blocks + 1, True
        block = Together(self, self._num_blocks)
        try:
            yield block
        finally:
            block.join()
            # Later turns have larger numbers than those that they follow.
            self._main_line = self._new_branch(0, self._main_line.after(self._parts, is_choice=is_choice))
            self._is_apart, self._parts = False, []
        block.finish()

    def begin_branch(self, block: int) -> Branch:
        """Return a new part of a block, with turn numbers of its own. Raises InvalidInput beyond MAX_BRANCHES, and within a part."""
        own = self.branch()
        if own is None or own.block:
            raise InvalidInput("`run` within a part is not supported: start all parts where the block was opened")
        part = self._new_branch(block, self._main_line.after())
        self._parts.append(part)
        return part

    def _new_branch(self, block: int, before: dict[str, int]) -> Branch:
        if self._num_branches >= MAX_BRANCHES:
            raise InvalidInput(f"an episode has at most {MAX_BRANCHES} parts that run at the same time as others")
        self._num_branches += 1
        return Branch(block, self._num_branches, before)

    def enter(self, branch: Branch | None) -> None:
        """Make a branch the one of the calling thread; None: forget the thread."""
        with self._lock:
            if branch is None:
                self._branches.pop(get_ident(), None)
            else:
                self._branches[get_ident()] = branch

    def _turn(self, request: TurnRequest, branch: Branch) -> Reply:
        number, before = branch.take(request.agent)
        numbered = replace(request, number=number, num_before=before)
        started = time.monotonic()
        try:
            return self._channel.turn(numbered)
        except TurnLimit:
            branch.give_back(request.agent)
            raise
        finally:
            with self._lock:
                self._waited_s += time.monotonic() - started

    @contextlib.contextmanager
    def tool_call(self) -> Iterator[None]:
        """Measure the time of a tool call and report its begin and end to the channel. Calls that overlap count once."""
        with self._lock:
            self._num_tools += 1
            is_first = self._num_tools == 1
            if is_first:
                self._channel.tool(True, self.rewards)
                self._tool_began, self._waited_before_s = time.monotonic(), self._waited_s
        try:
            yield
        finally:
            with self._lock:
                self._num_tools -= 1
                if self._num_tools == 0:
                    waited_s = self._waited_s - self._waited_before_s
                    self.tool_s += max(0.0, time.monotonic() - self._tool_began - waited_s)
                    self._channel.tool(False, self.rewards)

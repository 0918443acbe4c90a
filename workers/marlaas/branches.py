"""Parts of an episode that run at the same time: `Agents.together`, and the numbers of their turns."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from marlaas_api.names import BRANCH_TURNS


class Branch:
    """A part of an episode that one thread runs, with turn numbers of its own.

    Args:
        block: of parts that run at the same time, from 1; 0 for the main line.
        before: turns that the agents had when the branch began. With the branch's own they count against `rollout.maxTurns`, so
            no branch's limit depends on the pace of another.
    """

    def __init__(self, block: int, ordinal: int, before: Mapping[str, int]) -> None:
        self.block, self._first = block, ordinal * BRANCH_TURNS
        self._before = before
        self._used: dict[str, int] = {}

    def take(self, agent: str) -> tuple[int, int]:
        """Return the number of the agent's next turn, and how many turns the agent has had on the way to it."""
        used = self._used.get(agent, 0)
        self._used[agent] = used + 1
        return self._first + used, self._before.get(agent, 0) + used

    def give_back(self, agent: str) -> None:
        """Return the number of a turn that was not taken."""
        self._used[agent] -= 1

    def after(self, parts: Iterable["Branch"] = (), *, is_choice: bool = False) -> dict[str, int]:
        """Return the agents' turns before and in this branch and in parts that began at its end.

        Args:
            is_choice: the parts are candidates, of which an episode goes on with one: they count as one turn.
        """
        total = Counter(self._before) + Counter(self._used)
        used, more = [Counter(part._used) for part in parts], Counter[str]()
        for one in used:
            more = more | one if is_choice else more + one
        return dict(total + more)


class BranchingEpisode(Protocol):
    """What `Together` needs of an episode."""

    def begin_branch(self, block: int) -> Branch:
        """Return a new branch with turn numbers of its own."""
        ...

    def enter(self, branch: Branch | None) -> None:
        """Make a branch the one of the calling thread; None: forget the thread."""
        ...


class Part:
    """A part of an episode that runs at the same time as others. `result` is what its function returned, after the context."""

    def __init__(self) -> None:
        self._value: Any = None
        self.error: BaseException | None = None
        self.is_over = False

    @property
    def result(self) -> Any:
        """The function's return value. Raises RuntimeError within the context, in which it is not known yet."""
        if not self.is_over:
            raise RuntimeError("the result is known after the `with` block")
        return self._value

    def settle(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Call the function; keep its result or its exception."""
        try:
            self._value = function(*arguments)
        except BaseException as error:  # raised again in the thread of `play`
            self.error = error


class Together:
    """Parts of an episode that run at the same time, each in a thread of its own.

        with agents.together() as at_once:
            plan = at_once.run(agents.planner.say, task.prompt)
            critique = at_once.run(review, agents.critic)
        print(plan.result.text)

    Each part has turn numbers, and so seeds, of its own, in the order of the calls of `run`. So the episode depends on no
    thread's pace. Two parts of one context must not speak to one conversation: give each its own by `begin` or `fork`.
    """

    def __init__(self, episode: BranchingEpisode, block: int) -> None:
        self._episode, self._block = episode, block
        self._parts: list[tuple[Any, Part]] = []

    def run(self, function: Callable[..., object], *arguments: object) -> Part:
        """Start a part. The context waits for its end, and raises the first exception, in the order of the parts."""
        from threading import Thread  # few environments need it, and a fork without it copies a hundred pages less

        part, branch = Part(), self._episode.begin_branch(self._block)

        def play() -> None:
            self._episode.enter(branch)
            part.settle(function, arguments)
            self._episode.enter(None)

        thread = Thread(target=play, daemon=True)
        self._parts.append((thread, part))
        thread.start()
        return part

    def join(self) -> None:
        """Wait for all parts."""
        for thread, part in self._parts:
            thread.join()
            part.is_over = True

    def finish(self) -> None:
        """Raise the first part's exception, if any has one."""
        for _, part in self._parts:
            if part.error is not None:
                raise part.error

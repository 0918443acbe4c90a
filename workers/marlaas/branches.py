"""Parts of an episode that run at the same time: `Agents.together`, and the numbers of their turns."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from marlaas_api.names import BRANCH_TURNS

_T = TypeVar("_T")
PATIENCE_S = 10.0
"""Where parts run one after another, a part that neither ends nor speaks for this long may be waiting for the next part, which then begins."""


class Branch:
    """A part of an episode that one thread or task runs, with turn numbers of its own.

    Args:
        block: of parts that run at the same time, from 1; 0 for the main line.
        before: turns that the agents had when the branch began. With the branch's own they count against `rollout.maxTurns`, so
            no branch's limit depends on the pace of another.

    Attributes:
        num_open: turns that have begun and not ended.
    """

    def __init__(self, block: int, ordinal: int, before: Mapping[str, int]) -> None:
        self.block, self._first = block, ordinal * BRANCH_TURNS
        self.num_open = 0
        self._before = before
        self._next: dict[str, int] = {}
        self._returned: dict[str, set[int]] = {}

    def take(self, agent: str, num: int) -> tuple[list[int], int]:
        """Return the numbers of the agent's next turns, and how many turns the agent has had on the way to the last of them.

        Numbers that were given back are taken first.
        """
        returned, numbers = self._returned.setdefault(agent, set()), []
        for _ in range(num):
            number = min(returned, default=self._next.get(agent, 0))
            returned.discard(number)
            self._next[agent] = max(self._next.get(agent, 0), number + 1)
            numbers.append(number)
        self.num_open += num
        return [self._first + number for number in numbers], self._before.get(agent, 0) + numbers[-1]

    def end(self, agent: str, number: int, *, is_taken: bool) -> None:
        """Note the end of a turn. is_taken: it was generated; if not, its number is given back."""
        self.num_open -= 1
        if not is_taken:
            self._returned[agent].add(number - self._first)

    @property
    def _used(self) -> Counter[str]:
        """The agents' turns in this branch."""
        return Counter({agent: number - len(self._returned.get(agent, ())) for agent, number in self._next.items()})

    def after(self, parts: Iterable["Branch"] = (), *, is_choice: bool = False) -> dict[str, int]:
        """Return the agents' turns before and in this branch and in parts that began at its end.

        Args:
            is_choice: the parts are candidates, of which an episode goes on with one: they count as one turn.
        """
        total = Counter(self._before) + self._used
        used, more = [part._used for part in parts], Counter[str]()
        for one in used:
            more = more | one if is_choice else more + one
        return dict(total + more)


class BranchingEpisode(Protocol):
    """What `Together` needs of an episode. in_order: parts run one after another."""

    in_order: bool

    def begin_branch(self, block: int) -> Branch:
        """Return a new branch with turn numbers of its own."""
        ...

    def enter(self, branch: Branch | None) -> None:
        """Make a branch the one of the calling thread or task; None: forget the caller."""
        ...


class Part:
    """A part of an episode that runs at the same time as others. `result` is what its function returned, after the context."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_over = False

    @property
    def result(self) -> Any:
        """The function's return value. Raises RuntimeError within the context, in which it is not known yet."""
        if not self.is_over:
            raise RuntimeError("the result is known after the `with` block")
        return self.value

    def settle(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Call the function; keep its result or its exception."""
        try:
            self.value = function(*arguments)
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
        while self._episode.in_order and thread.is_alive():
            thread.join(PATIENCE_S)
            if not branch.num_open:
                break
        return part

    def join(self) -> None:
        """Wait for all parts."""
        for thread, part in self._parts:
            thread.join()
            part.is_over = True

    def finish(self) -> None:
        """Raise the first part's exception, if any has one."""
        raise_first(part for _, part in self._parts)


def raise_first(parts: Iterable[Part]) -> None:
    """Raise the first exception, in the order of the parts."""
    for part in parts:
        if part.error is not None:
            raise part.error


def at_once(calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """Call functions at the same time, each in a thread, the last one in this thread. Raises the first exception, in their order."""
    from threading import Thread

    parts = [Part() for _ in calls]
    *others, last = [partial(part.settle, call, ()) for part, call in zip(parts, calls, strict=True)]
    threads = [Thread(target=other, daemon=True) for other in others]
    for thread in threads:
        thread.start()
    last()
    for thread in threads:
        thread.join()
    raise_first(parts)
    return [part.value for part in parts]

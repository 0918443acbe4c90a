"""Channels that answer turns that are open at the same time, and the numbers of these turns."""

import threading

from marlaas.environment import Agents, TurnLimit
from marlaas.environment_types import Reply, TurnRequest
from marlaas.episode_state import EpisodeState
from marlaas_api.names import BRANCH_TURNS

FIRST, SECOND, AFTER = BRANCH_TURNS, 2 * BRANCH_TURNS, 3 * BRANCH_TURNS
"""Numbers of the first turns in the parts of a block of two, and after it."""


class OrderedReplies:
    """A channel that answers some turns in a fixed order, and all others at once. order: (agent, number) of these turns."""

    def __init__(self, *order: tuple[str, int], max_turns: int = 9) -> None:
        self.requests: list[TurnRequest] = []
        self._order, self._max_turns = list(order), max_turns
        self._changed = threading.Condition()

    def turn(self, request: TurnRequest) -> Reply:
        name = (request.agent, request.number)
        with self._changed:
            assert self._changed.wait_for(lambda: name not in self._order or self._order[0] == name, timeout=30)
            if name in self._order:
                self._order.remove(name)
            self._changed.notify_all()
            if request.num_before >= self._max_turns:
                raise TurnLimit(f"{request.agent} {request.number}")
            self.requests.append(request)
        return Reply(f"{request.agent}{request.number}", num_tokens=1, turn=request.number)

    def may_call(self, agents) -> None:
        pass

    def tool(self, is_open, rewards) -> None:
        pass

    def numbers(self) -> dict[str, list[tuple[int, int | None]]]:
        """By agent: its turns and what each continues, sorted."""
        found: dict[str, list[tuple[int, int | None]]] = {}
        for request in self.requests:
            found.setdefault(request.agent, []).append((request.number, request.parent))
        return {agent: sorted(turns) for agent, turns in sorted(found.items())}


class Meeting(OrderedReplies):
    """Answers turns when `num` of them are open, and then the next `num`."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self._meeting = threading.Barrier(num, timeout=30)

    def turn(self, request: TurnRequest) -> Reply:
        self._meeting.wait()
        return super().turn(request)


class Held(OrderedReplies):
    """Answers no turn before `may_answer` is set; `asked` is released by each."""

    def __init__(self, max_turns: int = 9) -> None:
        super().__init__(max_turns=max_turns)
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def turn(self, request: TurnRequest) -> Reply:
        self.asked.release()
        assert self.may_answer.wait(30)
        return super().turn(request)


def agents_of(channel: OrderedReplies, *names: str, is_strict: bool = True) -> Agents:
    """The agents of an episode on the channel, by default a and b."""
    return Agents(EpisodeState(names or ("a", "b"), channel, is_strict=is_strict))

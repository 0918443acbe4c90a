"""Which agents are in the trainer's memory, where more are admitted than fit. Pure: callbacks wake the agents.

An agent needs room for its adapter, gradient and moments while it trains. When another one waits for room, agents are
asked to leave (they are *parked*); a parked agent's state is its committed version in the blob store, from which it is
restored exactly when its next group arrives.

- An agent that waits goes first if its step is closed and all groups are there (it is *due*), then in order of arrival.
- Asked to leave, least recently entered first: agents without work between two steps; agents between two steps that have
  been here for QUANTUM_S; and only for a due agent, agents that wait for groups within a step. They begin that step again.

No deadlock: a due agent needs nothing but room, and every other one may have to leave for it. No endless exchange: a step is
begun again only for an agent that then commits one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

QUANTUM_S = 1.0
"""Seconds for which an agent with work stays, to amortise its restoring."""


class Pause(Enum):
    """What an agent that has room does next."""

    BETWEEN_STEPS = auto()
    """It has begun no step, and waits for work."""
    AFTER_STEP = auto()
    """It has begun no step, and has work for the next one."""
    WITHIN_STEP = auto()
    """It waits for groups of a step that it has begun."""
    BUSY = auto()
    """It computes within a step."""


_LAST = (Pause.BETWEEN_STEPS, Pause.AFTER_STEP, Pause.WITHIN_STEP)


@dataclass(slots=True, eq=False)
class _Here:
    """An agent that has room.

    Attributes:
        need: bytes of its room.
        since: time at which it entered, in seconds.
        wake: wakes the agent, so that it calls `pause`.
        pause: what it does next, as it last reported.
        is_asked: whether it was asked to leave.
    """

    need: int
    since: float
    wake: Callable[[], None]
    pause: Pause = Pause.BUSY
    is_asked: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    """An agent that waits for room.

    Attributes:
        need: bytes that it waits for.
        wake: wakes the agent, so that it calls `enter` again.
        is_due: whether its step is closed, and all groups of the step have arrived.
    """

    need: int
    wake: Callable[[], None]
    is_due: bool = False


@dataclass(slots=True)
class AgentRoom:
    """The trainer's memory for agents.

    Attributes:
        size: bytes for all agents together; 0 if unknown, and then all agents fit.
        now: returns the time in seconds.
    """

    size: int = 0
    now: Callable[[], float] = time.monotonic
    _here: dict[str, _Here] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def enter(self, agent: str, need: int, is_due: bool, wake: Callable[[], None]) -> bool:
        """Give an agent room if it is next and fits; return whether it has room. If not, it waits: call again after `wake`.

        Args:
            agent: its policy key.
            need: bytes; an agent that needs more than the whole room gets all of it.
            is_due: whether its step is closed and all groups of the step have arrived.
            wake: called when the agent can enter, and later when it has to leave.
        """
        if agent in self._here:
            return True
        waiting = self._waiting.setdefault(agent, _Waiting(min(need, self.size), wake))
        waiting.is_due = is_due
        enters = self._next() == agent and waiting.need <= self._free()
        if enters:
            del self._waiting[agent]
            self._here[agent] = _Here(waiting.need, self.now(), wake)
        self._serve()
        return enters

    def pause(self, agent: str, pause: Pause) -> bool:
        """Record what an agent with room does next, before it computes or waits; return whether it has to leave now."""
        here = self._here[agent]
        here.pause = pause
        self._serve()
        if pause is Pause.AFTER_STEP:
            here.pause = Pause.BUSY
        return here.is_asked

    def leave(self, agent: str) -> None:
        """Free the room of an agent; an agent that waits no longer waits. May be repeated."""
        self._waiting.pop(agent, None)
        self._here.pop(agent, None)
        self._serve()

    @property
    def is_shared(self) -> bool:
        """Whether several agents have room, and would leave for an agent that needs the whole room."""
        return self.size > 0 and len(self._here) > 1

    def _free(self) -> int:
        return self.size - sum(one.need for one in self._here.values())

    def _next(self) -> str | None:
        return min(self._waiting, key=lambda name: not self._waiting[name].is_due, default=None)

    def _serve(self) -> None:
        """Wake the first waiting agent if its memory is free; else ask as many agents to leave as it needs and as may be asked (`_may_ask`).

        They leave later: `pause` tells them to, and `leave` calls this again.
        """
        name = self._next()
        if name is None:
            return
        first = self._waiting[name]
        lacking = first.need - self._free()
        if lacking <= 0:
            first.wake()
            return
        lacking -= sum(one.need for one in self._here.values() if one.is_asked)
        may_leave = [one for one in self._here.values() if not one.is_asked and self._may_ask(one, first)]
        for one in sorted(may_leave, key=lambda one: (_LAST.index(one.pause), one.since)):
            if lacking <= 0:
                return
            one.is_asked = True
            lacking -= one.need
            one.wake()

    def _may_ask(self, here: _Here, first: _Waiting) -> bool:
        if here.pause is Pause.AFTER_STEP:
            return self.now() - here.since >= QUANTUM_S
        return here.pause is Pause.BETWEEN_STEPS or (here.pause is Pause.WITHIN_STEP and first.is_due)

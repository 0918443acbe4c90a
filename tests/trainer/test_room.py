"""Room for agents in the trainer's memory: who enters, who has to leave, and that random schedules neither block nor overfill it."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from tests.trainer.harness import Clock

from marlaas_worker.trainer.room import QUANTUM_S, AgentRoom, Pause


class Room(AgentRoom):
    """A room for 10 with a clock of its own; `woken`: how often each agent was woken."""

    def __init__(self) -> None:
        self.clock, self.woken = Clock(), Counter[str]()
        super().__init__(10, self.clock)

    def asks(self, agent: str, need: int, is_due: bool = False) -> bool:
        return self.enter(agent, need, is_due, lambda: self.woken.update([agent]))


@pytest.fixture
def room() -> Room:
    return Room()


def test_all_fit_if_the_size_is_unknown() -> None:
    room = AgentRoom()
    assert all(room.enter(str(number), 1 << 40, False, lambda: None) for number in range(50))


def test_one_that_is_larger_than_the_room_needs_all_of_it(room: Room) -> None:
    assert [room.asks("large", 99), room.asks("large", 99), room.asks("small", 1)] == [True, True, False]
    room.leave("large")
    assert room.woken == {"small": 1}
    assert room.asks("small", 1)


def test_agents_without_work_leave_first_and_of_them_the_one_that_entered_first(room: Room) -> None:
    for agent in "abc":
        assert room.asks(agent, 3)
        room.clock.at += QUANTUM_S
    assert [room.pause("a", Pause.AFTER_STEP), room.pause("b", Pause.BETWEEN_STEPS)] == [False, False]
    room.pause("c", Pause.BETWEEN_STEPS)
    assert not room.asks("d", 4)
    assert room.woken == {"b": 1}
    assert room.pause("b", Pause.BETWEEN_STEPS)
    room.leave("b")
    assert room.woken == {"b": 1, "d": 1}
    assert room.asks("d", 4)


def test_an_agent_with_work_leaves_between_two_steps_after_its_quantum(room: Room) -> None:
    assert room.asks("a", 10)
    assert not room.pause("a", Pause.BUSY)
    assert not room.asks("b", 1, is_due=True)
    assert not room.pause("a", Pause.AFTER_STEP)
    room.clock.at += QUANTUM_S
    assert [room.pause("a", Pause.BUSY), room.pause("a", Pause.AFTER_STEP)] == [False, True]


def test_a_step_that_has_begun_is_given_up_for_a_due_agent_only(room: Room) -> None:
    assert [room.asks("a", 10), room.asks("b", 5)] == [True, False]
    assert not room.pause("a", Pause.WITHIN_STEP)
    assert not room.asks("b", 5, is_due=True)
    assert room.woken == {"a": 1}
    assert room.pause("a", Pause.WITHIN_STEP)


def test_due_agents_enter_before_those_that_came_earlier_and_one_that_withdraws_lets_the_next_one_in(room: Room):
    assert room.asks("a", 10)
    assert not any(room.asks(agent, 10, is_due) for agent, is_due in (("b", False), ("c", False), ("d", True)))
    room.leave("a")
    assert room.woken == {"d": 1}
    assert [room.asks("b", 10), room.asks("d", 10, is_due=True)] == [False, True]
    room.leave("d")
    room.leave("b")
    assert (room.woken["b"], room.woken["c"]) == (1, 1)
    assert room.asks("c", 10)


@dataclass
class Agent:
    """An agent that trains steps of some groups, as `AgentTrainer` does."""

    name: str
    room: AgentRoom
    need: int
    num_groups: int
    is_here: bool = False
    taken: int = 0
    arrived: int = 0
    committed: int = 0
    begun_again: int = 0

    @property
    def is_due(self) -> bool:
        return self.arrived == self.num_groups

    @property
    def has_work(self) -> bool:
        return self.arrived > 0 and (self.taken < self.arrived or self.is_due)

    def turn(self) -> None:
        """What it does when it is woken."""
        if self.is_here and self.room.pause(self.name, self._pause()):
            self.begun_again += self.taken > 0
            self.taken, self.is_here = 0, False
            self.room.leave(self.name)
        if not self.is_here and self.arrived:
            self.is_here = self.room.enter(self.name, self.need, self.is_due, lambda: None)
        if self.is_here and self.has_work:
            self._work()

    def _pause(self) -> Pause:
        if self.taken:
            return Pause.BUSY if self.has_work else Pause.WITHIN_STEP
        return Pause.AFTER_STEP if self.has_work else Pause.BETWEEN_STEPS

    def _work(self) -> None:
        if self.taken < self.arrived:
            self.taken += 1
        else:
            self.committed, self.taken, self.arrived = self.committed + 1, 0, 0


@pytest.mark.parametrize("seed", range(50))
def test_random_schedules_end_and_never_overfill_the_room(seed: int) -> None:
    """A group of a step arrives only after all agents have committed the step before, so agents wait for one another."""
    chance, clock = random.Random(seed), Clock()
    size, num_steps = chance.randint(5, 12), 6
    room = AgentRoom(size, clock)
    agents = [Agent(str(at), room, chance.randint(1, size), chance.randint(1, 4)) for at in range(chance.randint(2, 7))]
    for _ in range(20_000):
        clock.at += chance.random() * QUANTUM_S
        agent, behind = chance.choice(agents), min(one.committed for one in agents)
        if chance.random() < 0.3 and agent.committed == behind < num_steps and not agent.is_due:
            agent.arrived += 1
        agent.turn()
        assert sum(one.need for one in agents if one.is_here) <= size
    assert {one.committed for one in agents} == {num_steps}
    assert sum(one.begun_again for one in agents) <= num_steps * len(agents)

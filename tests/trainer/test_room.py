"""Room for agents in the trainer's memory: who enters, who has to leave, and that random schedules neither block nor overfill it."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from tests.trainer.harness import Clock

from marlaas_worker.trainer.room import QUANTUM_S, AgentRoom, Pause


class Woken(Counter[str]):
    """How often each agent was woken."""

    def of(self, agent: str):
        return lambda: self.update([agent])


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def room(clock: Clock) -> AgentRoom:
    return AgentRoom(10, clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_all_fit_if_the_size_is_unknown(woken: Woken) -> None:
    room = AgentRoom()
    assert all(room.enter(str(number), 1 << 40, False, woken.of(str(number))) for number in range(50))


def test_one_that_is_larger_than_the_room_needs_all_of_it(room: AgentRoom, woken: Woken) -> None:
    assert room.enter("large", 99, False, woken.of("large"))
    assert not room.enter("small", 1, False, woken.of("small"))
    room.leave("large")
    assert woken == {"small": 1}
    assert room.enter("small", 1, False, woken.of("small"))


def test_entering_again_changes_nothing(room: AgentRoom, woken: Woken) -> None:
    assert [room.enter("a", 6, False, woken.of("a")) for _ in range(2)] == [True, True]
    assert room.enter("b", 4, False, woken.of("b"))


def test_agents_without_work_leave_first_and_of_them_the_one_that_entered_first(
    room: AgentRoom, woken: Woken, clock: Clock
) -> None:
    for agent in "abc":
        assert room.enter(agent, 3, False, woken.of(agent))
        clock.at += QUANTUM_S
    assert [room.pause("a", Pause.AFTER_STEP), room.pause("b", Pause.BETWEEN_STEPS)] == [False, False]
    room.pause("c", Pause.BETWEEN_STEPS)
    assert not room.enter("d", 4, False, woken.of("d"))
    assert woken == {"b": 1}
    assert room.pause("b", Pause.BETWEEN_STEPS)
    room.leave("b")
    assert woken == {"b": 1, "d": 1}
    assert room.enter("d", 4, False, woken.of("d"))


def test_an_agent_with_work_leaves_between_two_steps_after_its_quantum(
    room: AgentRoom, woken: Woken, clock: Clock
) -> None:
    assert room.enter("a", 10, False, woken.of("a"))
    assert not room.pause("a", Pause.BUSY)
    assert not room.enter("b", 1, True, woken.of("b"))
    assert not room.pause("a", Pause.AFTER_STEP)
    clock.at += QUANTUM_S
    assert not room.pause("a", Pause.BUSY)
    assert room.pause("a", Pause.AFTER_STEP)


def test_a_step_that_has_begun_is_given_up_for_a_due_agent_only(room: AgentRoom, woken: Woken) -> None:
    assert room.enter("a", 10, False, woken.of("a"))
    assert not room.enter("b", 5, False, woken.of("b"))
    assert not room.pause("a", Pause.WITHIN_STEP)
    assert not room.enter("b", 5, True, woken.of("b"))
    assert woken == {"a": 1}
    assert room.pause("a", Pause.WITHIN_STEP)


def test_due_agents_enter_before_those_that_came_earlier(room: AgentRoom, woken: Woken) -> None:
    assert room.enter("a", 10, False, woken.of("a"))
    for agent, is_due in (("b", False), ("c", False), ("d", True)):
        assert not room.enter(agent, 10, is_due, woken.of(agent))
    room.leave("a")
    assert woken == {"d": 1}
    assert not room.enter("b", 10, False, woken.of("b"))
    assert room.enter("d", 10, True, woken.of("d"))


def test_one_that_withdraws_lets_the_next_one_in(room: AgentRoom, woken: Woken) -> None:
    assert room.enter("a", 6, False, woken.of("a"))
    assert not room.enter("b", 10, False, woken.of("b"))
    assert not room.enter("c", 4, False, woken.of("c"))
    room.leave("b")
    assert woken["c"] == 1
    assert room.enter("c", 4, False, woken.of("c"))


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


@pytest.mark.parametrize("seed", range(100))
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

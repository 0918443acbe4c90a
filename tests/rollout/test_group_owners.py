"""Which of an agent's replicas generates a group's turns: by load, the same for all members, and rarely another than before."""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from marlaas_worker.rollout.homes import EVEN, MIN_EXCESS, Homes

KEY = "team-a.sums.policy"
Owner = Callable[[Homes, str, str], str]


def homes_of(**loads: int) -> Homes:
    return Homes({KEY: tuple(loads)}, tuple(loads), loads)


def shares(homes: Homes, num: int = 1024) -> dict[str, float]:
    """The parts of new groups."""
    found = Counter(homes.owner(KEY, f"uid-t{number}") for number in range(num))
    return {name: found[name] / num for name in homes.of(KEY)}


@pytest.mark.parametrize("first", [0, 5, 1000])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_groups_of_a_step_are_divided_evenly_while_the_loads_are_equal(num: int, first: int) -> None:
    placed = homes_of(**{f"r{number}": 7 for number in range(num)})
    found = Counter(placed.owner(KEY, f"uid-t{number}") for number in range(first, first + 4 * num))
    assert max(found.values()) - min(found[name] for name in placed.of(KEY)) <= 2


@pytest.mark.parametrize(
    ("loads", "parts"), [((8, 8), (1, 1)), ((0, 8), (4, 1)), ((40, 16), (1, 4)), ((8, 8, 24), (4, 4, 1))]
)
def test_new_groups_are_divided_by_the_inverse_square_of_the_loads(
    loads: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    """Of the loads plus eight: (16, 16); (8, 16); (48, 24); (16, 16, 32)."""
    assert EVEN == 8
    found = shares(homes_of(**{f"r{number}": load for number, load in enumerate(loads)}))
    assert list(found.values()) == pytest.approx([part / sum(parts) for part in parts], abs=0.01)


@pytest.mark.parametrize(
    ("loads", "is_overloaded"),
    [((8, 0), False), ((9, 0), True), ((24, 12), False), ((25, 12), True), ((9, 2), False), ((30, 30), False)],
)
def test_a_replica_is_overloaded_with_twice_the_load_of_another_and_eight_requests_more(loads, is_overloaded) -> None:
    assert MIN_EXCESS == 8
    placed = homes_of(a=loads[0], b=loads[1])
    stay = [placed.owner(KEY, f"uid-t{number}", last="a") == "a" for number in range(256)]
    assert all(stay) is not is_overloaded


def test_the_part_of_an_overloaded_replicas_groups_moves_that_exceeds_the_mean_and_no_other_one() -> None:
    """30 and 10: a third of the 30 is above the mean of 20."""
    placed, groups = homes_of(a=30, b=10), [f"uid-t{number}" for number in range(2000)]
    moved = {group for group in groups if placed.owner(KEY, group, last="a") == "b"}
    assert len(moved) / len(groups) == pytest.approx(1 / 3, abs=0.03)
    assert all(placed.owner(KEY, group, last="b") == "b" for group in groups)
    assert {group for group in groups if homes_of(a=60, b=20).owner(KEY, group, last="a") == "b"} == moved


def test_a_group_leaves_a_replica_that_its_agent_has_left_and_names_of_others_mean_nothing() -> None:
    placed = homes_of(a=0, b=0)
    for last in ("gone", "", "c", "\0"):
        assert placed.owner(KEY, "uid-t0", last) == placed.owner(KEY, "uid-t0")


# an agent on two replicas, with reports that are two seconds old ---------------------------------------------------------

REPORT_S, GROUP, TURNS, OUTSTANDING, TURN_S = 2.0, 8, 3, 8, 0.5


@dataclass
class Replica:
    """Generates turns, each of them for TURN_S / speed seconds, up to `places` at once. sent: turns that it was sent."""

    speed: float
    places: int = 16
    waiting: list[tuple[str, int]] = field(default_factory=list)
    num_running: int = 0
    sent: int = 0

    @property
    def load(self) -> int:
        return self.num_running + len(self.waiting)


class Simulation:
    """A closed loop: OUTSTANDING groups of GROUP episodes of TURNS turns, and a new group whenever one has ended."""

    def __init__(self, owner: Owner, **speeds: float) -> None:
        self._owner, self._chance = owner, random.Random(0)
        self.replicas = {name: Replica(speed) for name, speed in speeds.items()}
        self._events: list[tuple[float, int, str, str, int]] = []
        self._last: dict[str, str] = {}
        self._left: dict[str, int] = {}
        self.ended = self.moved = 0
        self._number = self._order = 0
        self._seen = self._loads()

    def run(self, seconds: float) -> float:
        """Return groups per second."""
        self._push(REPORT_S, "", "", 0)
        for _ in range(OUTSTANDING):
            self._begin(0.0)
        while self._events and self._events[0][0] < seconds:
            at, _, replica, group, turn = heapq.heappop(self._events)
            if replica:
                self._turn_ended(at, replica, group, turn)
            else:
                self._seen = self._loads()
                self._push(at + REPORT_S, "", "", 0)
        return self.ended / seconds

    def _loads(self) -> Mapping[str, int]:
        return {name: one.load for name, one in self.replicas.items()}

    def _begin(self, at: float) -> None:
        group, self._number = f"uid-t{self._number}", self._number + 1
        self._left[group] = GROUP
        for _ in range(GROUP):
            self._send(at, group, 0, "")

    def _send(self, at: float, group: str, turn: int, last: str) -> None:
        names = tuple(self.replicas)
        owner = self._owner(Homes({KEY: names}, names, self._seen), group, last)
        self.moved += bool(last) and owner != last
        self._last[group] = owner
        self.replicas[owner].sent += 1
        self.replicas[owner].waiting.append((group, turn))
        self._serve(at, owner)

    def _serve(self, at: float, name: str) -> None:
        replica = self.replicas[name]
        while replica.waiting and replica.num_running < replica.places:
            group, turn = replica.waiting.pop(0)
            replica.num_running += 1
            self._push(at + self._chance.uniform(0.5, 1.5) * TURN_S / replica.speed, name, group, turn)

    def _turn_ended(self, at: float, name: str, group: str, turn: int) -> None:
        self.replicas[name].num_running -= 1
        if turn + 1 < TURNS:
            self._send(at, group, turn + 1, self._last[group])
        else:
            self._left[group] -= 1
            if not self._left[group]:
                self.ended += 1
                self._begin(at)
        self._serve(at, name)

    def _push(self, at: float, *event) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, *event))


def by_load(homes: Homes, group: str, last: str) -> str:
    return homes.owner(KEY, group, last)


def in_turn(homes: Homes, group: str, last: str) -> str:
    return last or homes.of(KEY)[int(group.removeprefix("uid-t")) % 2]


def test_a_slow_replica_does_not_hold_up_an_agent_that_lives_on_two() -> None:
    ideal = (1.0 + 0.25) * 16 / TURN_S / (GROUP * TURNS)
    loop = Simulation(by_load, fast=1.0, slow=0.25)
    rate = loop.run(600.0)
    assert rate > 0.85 * ideal
    assert rate > 1.8 * Simulation(in_turn, fast=1.0, slow=0.25).run(600.0)
    assert loop.replicas["slow"].sent > 0.1 * loop.replicas["fast"].sent, "the slow one does its part"


def test_replicas_that_are_equally_fast_share_the_groups_and_nearly_no_conversation_moves() -> None:
    loop = Simulation(by_load, a=1.0, b=1.0)
    rate = loop.run(600.0)
    sent = [one.sent for one in loop.replicas.values()]
    assert min(sent) > 0.9 * max(sent)
    assert loop.moved < 0.02 * sum(sent)
    assert rate > 0.95 * Simulation(in_turn, a=1.0, b=1.0).run(600.0)

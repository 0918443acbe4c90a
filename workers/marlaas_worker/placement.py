"""Which worker has which agent: rendezvous hashing with bounded load and hysteresis. Pure.

Every worker computes the same placement from the same observations, so no coordinator has to assign agents.

- An agent without a live holder goes to the worker that ranks highest for it (rendezvous hashing) among those whose
  load stays at most the mean; if none has room, to the least loaded. So when a worker ends, only its own agents move.
- An agent may have several parts, each with a part of its load; they go to different workers.
- An agent with a live holder stays, unless the loads differ by too much. Then agents move, one at a time, from the most
  to the least loaded worker, until the loads are well inside the limits (hysteresis: small changes move nothing). An agent
  also moves if that alone lowers the largest load by more than GAIN x mean: with few agents of different costs, loads
  inside the limits may differ by much.

Bounds, for agents that may go anywhere: no load exceeds (1 + EPSILON) x mean + the largest cost. A worker that joins
takes over about the mean.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

EPSILON = 0.25
"""Agents move if a load differs from the mean load by more than EPSILON x mean + the largest cost, until the difference is at most half of
that or no move helps."""
GAIN = 0.1
"""Reduction of the largest load, relative to the mean load, above which one agent moves. A move costs a re-load of adapters, 0.1 s."""


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """An agent to place, or a part of one.

    Attributes:
        cost: its load, above 0, in any unit.
        holder: the worker that has it now; empty if none.
        refused: workers that do not take it at present.
        whole: the agent that this is a part of, if it is one; the parts of an agent go to different workers. Empty: this is a whole agent.
    """

    cost: float = 1.0
    holder: str = ""
    refused: frozenset[str] = frozenset()
    whole: str = ""


def place(agents: Mapping[str, AgentLoad], workers: Collection[str]) -> dict[str, str]:
    """Return the worker of each agent or part, by its name in `agents`.

    Agents that all workers refuse, and parts of an agent beyond the number of workers, are left out.
    """
    eligible = {name: agents[name] for name in sorted(agents) if set(workers) - agents[name].refused}
    if not eligible:
        return {}
    loads = _Loads(eligible, workers)
    for name in sorted(eligible, key=lambda name: (-eligible[name].cost, name)):
        loads.add(name)
    loads.balance()
    return loads.placed


def rank(agent: str, worker: str) -> int:
    """Return the rank of a worker for an agent: a hash of both names, the same in every process. The worker with the highest rank is preferred."""
    return int.from_bytes(hashlib.blake2b(f"{agent}\0{worker}".encode(), digest_size=8).digest(), "big")


class _Loads:
    """The workers' loads while a placement is computed. Agents with a live holder are placed there first.

    Args:
        agents: those that at least one worker takes, by name.

    Attributes:
        placed: the worker of each agent that is placed so far.
    """

    def __init__(self, agents: Mapping[str, AgentLoad], workers: Collection[str]) -> None:
        self._agents = agents
        self._of = dict.fromkeys(sorted(workers), 0.0)
        self._mean = sum(agent.cost for agent in agents.values()) / len(self._of)
        self._largest = max(agent.cost for agent in agents.values())
        self._parts: set[tuple[str, str]] = set()
        self.placed: dict[str, str] = {}
        for name, agent in agents.items():
            if agent.holder in self._of and self._may_have(agent.holder, agent):
                self._put(name, agent.holder)

    def add(self, name: str) -> None:
        """Place an agent that has no live holder."""
        if name in self.placed:
            return
        agent = self._agents[name]
        allowed = [worker for worker in self._of if self._may_have(worker, agent)]
        roomy = [worker for worker in allowed if self._of[worker] + agent.cost <= self._mean]
        if roomy:
            self._put(name, max(roomy, key=lambda worker: rank(name, worker)))
        elif allowed:
            self._put(name, min(allowed, key=lambda worker: (self._of[worker], -rank(name, worker))))

    def balance(self) -> None:
        """Move agents until the workers' loads are balanced: first by the limits of EPSILON, then by moves whose effect exceeds GAIN."""
        self._bound()
        while (found := self._worthwhile()) is not None:
            self._put(*found)

    def _bound(self) -> None:
        if self._is_within(EPSILON, self._largest):
            return
        while not self._is_within(EPSILON / 2, self._largest / 2) and self._move():
            pass

    def _worthwhile(self) -> tuple[str, str] | None:
        """Return the agent and its new worker if one move lowers the largest load by more than GAIN x mean; None if none does."""
        giver = max(self._of, key=lambda worker: (self._of[worker], worker))
        receiver = min(self._of, key=lambda worker: (self._of[worker], worker))
        after = {
            name: max(self._of[giver] - agent.cost, self._of[receiver] + agent.cost)
            for name, agent in self._agents.items()
            if self.placed.get(name) == giver and self._may_have(receiver, agent)
        }
        # Rounded: else rounding errors decide between moves of the same effect, differently with every report.
        best = min(after, key=lambda name: (round(after[name] / self._mean, 9), name), default=None)
        if best is None or self._of[giver] - after[best] <= GAIN * self._mean:
            return None
        return best, receiver

    def _is_within(self, epsilon: float, slack: float) -> bool:
        low, high = (1 - epsilon) * self._mean - slack, (1 + epsilon) * self._mean + slack
        return low <= min(self._of.values()) and max(self._of.values()) <= high

    def _move(self) -> bool:
        """Move one agent away from the most loaded worker, if a move makes two loads more equal; return whether one moved."""
        giver = max(self._of, key=lambda worker: (self._of[worker], worker))
        return any(self._move_to(one, giver) for one in sorted(self._of, key=lambda worker: (self._of[worker], worker)))

    def _move_to(self, receiver: str, giver: str) -> bool:
        """Move one agent from one worker to another if that makes the two loads more equal; return whether one moved.

        Of the agents that cost at most half of the difference, the one with the highest rank for the receiver moves; else the cheapest.
        """
        gap = self._of[giver] - self._of[receiver]
        movable = [
            name
            for name, worker in self.placed.items()
            if worker == giver and self._agents[name].cost < gap and self._may_have(receiver, self._agents[name])
        ]
        if not movable:
            return False
        fitting = [name for name in movable if self._agents[name].cost <= gap / 2]
        chosen = (
            max(fitting, key=lambda name: (rank(name, receiver), name))
            if fitting
            else min(movable, key=lambda name: (self._agents[name].cost, name))
        )
        self._put(chosen, receiver)
        return True

    def _may_have(self, worker: str, agent: AgentLoad) -> bool:
        return worker not in agent.refused and (agent.whole, worker) not in self._parts

    def _put(self, name: str, worker: str) -> None:
        agent = self._agents[name]
        if name in self.placed:
            self._of[self.placed[name]] -= agent.cost
            self._parts.discard((agent.whole, self.placed[name]))
        self.placed[name] = worker
        self._of[worker] += agent.cost
        if agent.whole:
            self._parts.add((agent.whole, worker))

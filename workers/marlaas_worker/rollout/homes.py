"""The replicas of a pool that serve each agent. Pure: all replicas compute the same from the same documents and reports.

An agent lives on the fewest replicas whose batches hold its open episodes; the other replicas need not hold its adapter.
The groups of an agent go to its replicas in turn, and the members of a group to one replica, which computes their prompt
once. Replicas that see different documents or reports for a moment may choose different owners; then both generate a
turn, and the first record counts (`turn_log`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from marlaas_api.messages import JobAgent, ReplicaReport
from marlaas_api.names import group_token
from marlaas_worker.placement import AgentLoad, place, rank

MIN_PART = 0.1
"""Least cost of an agent, as a part of the mean of its job's agents: it may become busy at any time."""
_NUMBER = re.compile(r"[a-z](\d+)")


@dataclass(frozen=True, slots=True)
class Homes:
    """The replicas of each agent, by its policy key; `everywhere` serves all others."""

    by_agent: Mapping[str, tuple[str, ...]]
    everywhere: tuple[str, ...]

    def of(self, policy_key: str) -> tuple[str, ...]:
        """Return an agent's replicas, the one that ranks highest first."""
        return self.by_agent.get(policy_key, self.everywhere)

    def owner(self, policy_key: str, group: str) -> str:
        """Return the replica that generates the turns of a group.

        Any text is accepted as the group's name, because the owner is chosen before the request is checked.
        """
        replicas = self.of(policy_key)
        return replicas[_number(group) % len(replicas)]


def homes(
    agents: Collection[JobAgent], replicas: Collection[str], num_seqs: int, reports: Iterable[ReplicaReport]
) -> Homes:
    """Place agents on replicas.

    Args:
        replicas: those that can serve; at least one.
        num_seqs: requests in a replica's batch.
        reports: they tell which replica holds an agent's adapter now, which keeps the agent if the loads allow; and how
            the recent tokens of a job divide among its agents.
    """
    reports = list(reports)
    loads = {one.policy_key: one.document.spec.open_episodes for one in agents}
    needs = {key: min(len(replicas), math.ceil(load / num_seqs)) for key, load in loads.items()}
    held = _held(reports)
    names = {one.policy_key: one.adapter(0).engine_name.partition("@")[0] for one in agents}
    costs = _costs(agents, loads, reports)
    single = {
        key: AgentLoad(costs[key], _holder(key, held.get(names[key], ()), replicas))
        for key, need in needs.items()
        if need == 1
    }
    by_agent: dict[str, tuple[str, ...]] = {key: (name,) for key, name in place(single, replicas).items()}
    for key, need in needs.items():
        if need > 1:
            by_agent[key] = _ranked(key, replicas)[:need]
    return Homes(by_agent, _ranked("", replicas))


def _costs(agents: Iterable[JobAgent], loads: Mapping[str, int], reports: Iterable[ReplicaReport]) -> dict[str, float]:
    """Return the cost of each agent: its load, and within a job of several agents in the ratio of their recent tokens."""
    tokens: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for key, number in report.agent_tokens.items():
            tokens[key] += number
    by_job: dict[str, list[str]] = {}
    for one in agents:
        by_job.setdefault(one.document.uid, []).append(one.policy_key)
    costs = {key: float(load) for key, load in loads.items()}
    for keys in by_job.values():
        mean = sum(tokens[key] for key in keys) / len(keys)
        if mean > 0:
            costs |= {key: loads[key] * max(tokens[key] / mean, MIN_PART) for key in keys}
    return costs


def _ranked(key: str, replicas: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(replicas, key=lambda replica: (-rank(key, replica), replica)))


def _held(reports: Iterable[ReplicaReport]) -> dict[str, set[str]]:
    """Return the replicas that hold a version of an agent, by the agent's part of the engine names."""
    found: dict[str, set[str]] = {}
    for report in reports:
        for name in report.verified:
            found.setdefault(name.partition("@")[0], set()).add(report.replica)
    return found


def _holder(key: str, held: Collection[str], replicas: Collection[str]) -> str:
    return next((name for name in _ranked(key, replicas) if name in held), "")


def _number(group: str) -> int:
    """Return the index in a group's name, such as 12 in `t12`; 0 if it is no group's name."""
    try:
        match = _NUMBER.match(group_token(group))
        return int(match[1]) if match else 0
    except ValueError:
        return 0

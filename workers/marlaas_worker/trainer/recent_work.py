"""Costs of agents for their placement on trainers: the share of a trainer's time that each has used recently. Pure.

Each trainer reports, for every agent that it has or had, the seconds of computation and the seconds for which the agent
was bound; both count half after ten minutes. So the cost of an agent that moves does not change: the sums over all
trainers stay the same. Steps may take minutes; with a shorter half-life an agent would seem idle between two steps.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

HALF_LIFE_S = 600.0
PRIOR_S = 60.0
"""An agent's cost is computed as if it had also been bound for this many seconds at the mean cost of all agents.

So a new agent, which has no measurements, has the mean cost.
"""
MIN_PART = 0.1
"""Least cost of an agent, as a fraction of the mean cost: an idle agent may become busy at any time."""

Work = Mapping[str, tuple[float, float]]
"""By policy key: recent seconds of the agent's computation, and recent seconds for which the agent was bound."""


@dataclass(slots=True)
class RecentWork:
    """Recent seconds of computation, and of being bound, of one agent on one trainer. Each second counts half after HALF_LIFE_S.

    The caller passes the time, in seconds.
    """

    at: float
    """Time of the last call of `advance`, or of the creation."""
    computed_s: float = 0.0
    """Recent seconds of the agent's computation."""
    bound_s: float = 0.0
    """Recent seconds for which the agent was bound."""
    _total_s: float = 0.0

    def advance(self, total_s: float, is_bound: bool, now: float) -> tuple[float, float]:
        """Count the time since the last call; return the recent seconds of computation, and for which the agent was bound.

        total_s: seconds of the agent's computation since the trainer's start. is_bound: whether the agent is bound now.
        """
        elapsed_s = now - self.at
        remaining = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self.computed_s = self.computed_s * remaining + total_s - self._total_s
        self.bound_s = self.bound_s * remaining + (elapsed_s if is_bound else 0.0)
        self._total_s = total_s
        self.at = now
        return round(self.computed_s, 3), round(self.bound_s, 3)


def recent_costs(agents: Collection[str], reported: Iterable[Work]) -> dict[str, float]:
    """Return the cost of each agent, by policy key: seconds of computation per second of being bound; 1 for all if nothing was computed.

    Args:
        agents: policy keys.
        reported: the work that each trainer reports.
    """
    busy = dict.fromkeys(agents, 0.0)
    bound = dict.fromkeys(agents, 0.0)
    for work in reported:
        for key in busy.keys() & work.keys():
            busy[key] += work[key][0]
            bound[key] += work[key][1]
    total_s = sum(bound.values())
    if not total_s or not any(busy.values()):
        return dict.fromkeys(agents, 1.0)
    mean = sum(busy.values()) / total_s
    return {key: max((busy[key] + PRIOR_S * mean) / (bound[key] + PRIOR_S), MIN_PART * mean) for key in agents}

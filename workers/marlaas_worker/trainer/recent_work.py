"""Costs of agents for their placement on trainers: the share of a trainer's time that each has used recently. Pure.

Each trainer reports, for every agent that it has or had, the seconds of computation and the seconds for which the agent
was bound; both count half after ten minutes. So the cost of an agent that moves does not change: the sums over all
trainers stay the same. Steps may take minutes, and a shorter time would see an agent as idle between two of them.
"""

from collections.abc import Collection, Container, Iterable, Mapping

from marlaas_worker.recent import RecentSums

HALF_LIFE_S = 600.0
PRIOR_S = 60.0
"""Seconds for which an agent counts as the mean of all agents, in addition to what was measured: new agents are unknown."""
MIN_PART = 0.1
"""Least cost of an agent, as a part of the mean: it may become busy at any time."""
_LEAST_S = 1e-3

Work = Mapping[str, tuple[float, float]]
"""Recent seconds of computation, and for which the agent was bound, by policy key."""


class RecentWork:
    """The recent work of one trainer's agents. The caller passes the clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._busy, self._bound = RecentSums(HALF_LIFE_S, _LEAST_S), RecentSums(HALF_LIFE_S, _LEAST_S)
        self._totals: dict[str, float] = {}
        self._at = now

    def advance(self, busy_s: Mapping[str, float], bound: Collection[str], now: float) -> Work:
        """Count the time since the last call, and return the recent work.

        Args:
            busy_s: seconds of computation since the trainer's start, by policy key. A key whose total has become smaller
                begins anew.
            bound: policy keys of the agents that are bound now.
        """
        grown = {key: total - self._totals.get(key, 0.0) for key, total in busy_s.items()}
        self._busy.add({key: more if more >= 0 else busy_s[key] for key, more in grown.items() if more}, now)
        self._bound.add(dict.fromkeys(bound, now - self._at), now)
        self._totals, self._at = dict(busy_s), now
        busy = self._busy.at(now)
        return {key: (round(busy.get(key, 0.0), 3), round(total, 3)) for key, total in self._bound.at(now).items()}

    def keep(self, jobs: Container[str]) -> None:
        """Drop the work of agents of all other jobs; jobs are given by key."""
        for sums in (self._busy, self._bound):
            sums.keep(lambda key: key.rpartition(".")[0] in jobs)


def recent_costs(agents: Collection[str], reported: Iterable[Work]) -> dict[str, float]:
    """Return the cost of each agent, by policy key: seconds of computation per second; 1 for all if nothing was computed.

    Args:
        reported: the work that each trainer reports.
    """
    busy, bound = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0.0)
    for work in reported:
        for key in busy.keys() & work.keys():
            busy[key] += work[key][0]
            bound[key] += work[key][1]
    total_s = sum(bound.values())
    if not total_s or not any(busy.values()):
        return dict.fromkeys(agents, 1.0)
    mean = sum(busy.values()) / total_s
    return {key: max((busy[key] + PRIOR_S * mean) / (bound[key] + PRIOR_S), MIN_PART * mean) for key in agents}

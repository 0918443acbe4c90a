"""Engine time and tokens by job and agent. Pure; the caller passes the clock, in seconds."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_worker.recent import RecentSums


@dataclass(frozen=True, slots=True)
class Account:
    """Tenant and job that a request is charged to. weight: the tenant's share relative to other tenants."""

    tenant: str
    weight: float
    job: str


HALF_LIFE_S = 60.0
"""Age at which tokens of an agent count half."""


def recent_tokens() -> RecentSums:
    """Return the sums of agents' recent tokens, by policy key. Less than one token is forgotten."""
    return RecentSums(HALF_LIFE_S, 1.0)


@dataclass(slots=True)
class EngineMeter:
    """Engine time and generated tokens since the role's start, by job uid.

    busy_s: seconds with a non-empty batch. Each of n requests in the engine is charged 1/n of the time. agents: uncached
    prompt and output tokens of agents of jobs with several policies.
    """

    busy_s: float = 0.0
    num_running: int = 0
    job_tokens: Counter[str] = field(default_factory=Counter)
    job_engine_s: dict[str, float] = field(default_factory=dict)
    agents: RecentSums = field(default_factory=recent_tokens)
    _share_s: float = 0.0
    _at: float = 0.0  # Only used while a request runs; the first `enter` sets it.

    def enter(self, now: float) -> float:
        """Note that a request enters the engine; return the mark to pass to `leave`."""
        self.advance(now)
        self.num_running += 1
        return self._share_s

    def leave(self, mark: float, uid: str, now: float) -> None:
        """Note that a request left the engine, and charge its share of the time to its job."""
        self.advance(now)
        self.num_running -= 1
        self.job_engine_s[uid] = self.job_engine_s.get(uid, 0.0) + self._share_s - mark

    def forget(self, jobs: Iterable[str]) -> None:
        """Remove the totals of jobs that are gone."""
        for uid in jobs:
            self.job_tokens.pop(uid, None)
            self.job_engine_s.pop(uid, None)

    def advance(self, now: float) -> None:
        """Update the totals to `now`."""
        if self.num_running:
            self.busy_s += now - self._at
            self._share_s += (now - self._at) / self.num_running
        self._at = now

"""Reasons to fail a job: an environment that does not fit it, too many faults, or trainers that have all given it up. Pure.

Faults count as a share of the latest episodes, so that a short outage long ago does not fail the job.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api.last_words import visible
from marlaas_api.messages import Episode, JobDocument, ReplicaReport, agents_on

RETURN_S = 120.0
"""Seconds for which a trainer without a report is expected back.

A rolling update of a pool replaces its trainers one after the other, and each of them loads its model.
"""


@dataclass(slots=True)
class GivenUp:
    """Decides whether all trainers of a pool have given up an agent of the job. Keeps the time of each trainer's last report, by pool and name."""

    _seen_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def words(self, document: JobDocument, reports: Iterable[ReplicaReport], now: float) -> str | None:
        """Return one trainer's reason if every trainer of a pool has given up the same agent of the job; None otherwise.

        Trainers whose report is missing for less than RETURN_S count as trainers that have not given up. now: seconds of any clock.
        """
        trainers = [report for report in reports if report.role == "trainer" and report.pool in document.pools]
        self._seen_at |= {(report.pool, report.replica): now for report in trainers}
        for pool in sorted(document.pools):
            for agent in agents_on(pool, document):
                said = {one.replica: one.broken.get(agent.fault_key) for one in trainers if one.pool == pool}
                if words := self._of(pool, said, now):
                    return words
        return None

    def _of(self, pool: str, said: Mapping[str, str | None], now: float) -> str | None:
        """Return one reason if all trainers of a pool have given up an agent. said: by trainer, its reason; None: it has not given up."""
        mine = ((name, at) for (where, name), at in self._seen_at.items() if where == pool)
        is_awaited = any(name not in said and now - at < RETURN_S for name, at in mine)
        return None if is_awaited or not all(said.values()) else next(iter(said.values()), None)


class FaultWatch:
    """Decides whether a job fails because too many of its latest episodes ended in faults.

    Args:
        window: number of the latest episodes that count.
        at_least: number of episodes before which the job does not fail.
        max_share: largest share of faults with which the job goes on.
        has_scored: whether an episode of the job was scored earlier.

    Attributes:
        permanent: text of a fault that every play of the job would have; empty if there was none before the first scored episode. Once
            the environment has worked, the job does not fail because one sandbox cannot load it: such faults count for the share.
    """

    def __init__(self, window: int, max_share: float, at_least: int, *, has_scored: bool = False) -> None:
        self.permanent = ""
        self._has_scored = has_scored
        self._recent: dict[tuple[str, int], bool] = {}
        self._window = window
        self._max_share = max_share
        self._at_least = at_least
        self._last_text = ""

    def add(self, episode: Episode) -> None:
        """Add an episode to the window; another one of the same member within the window changes nothing."""
        member = (episode.group, episode.member)
        if member in self._recent:
            return
        self._recent[member] = episode.fault is not None
        if len(self._recent) > self._window:
            del self._recent[next(iter(self._recent))]
        self._has_scored |= episode.fault is None
        if episode.is_permanent and not self._has_scored:
            self.permanent = visible(episode.fault_text)
        if episode.fault is not None:
            self._last_text = f"{episode.fault.value}: {visible(episode.fault_text)}"

    def verdict(self) -> str | None:
        """Return why the job must fail, with the last fault's text; None while the share is within the limit or too few episodes are known."""
        if len(self._recent) < self._at_least:
            return None
        share = sum(self._recent.values()) / len(self._recent)
        if share <= self._max_share:
            return None
        return (
            f"{share:.0%} of the last {len(self._recent)} episodes were lost to faults; the last one: {self._last_text}"
        )

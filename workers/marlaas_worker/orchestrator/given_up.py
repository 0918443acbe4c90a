"""Detects that all trainers of a job's pool have given the job up. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import JobDocument, ReplicaReport

RETURN_S = 120.0
"""Seconds for which a trainer without a report is expected back.

A rolling update of a pool replaces its trainers one after the other, and each of them loads its model.
"""


@dataclass(slots=True)
class GivenUp:
    """Names of the pool's trainers, with the time of their last report in seconds of the caller's clock."""

    _seen_at: dict[str, float] = field(default_factory=dict)

    def words(self, document: JobDocument, reports: Iterable[ReplicaReport], now: float) -> str | None:
        """Return one trainer's reason if every trainer has given the job up; None otherwise.

        Trainers whose report is missing for less than RETURN_S count as trainers that have not given up.
        """
        trainers = [report for report in reports if report.role == "trainer" and report.pool == document.pool]
        said = {report.replica: report.broken.get(document.uid) for report in trainers}
        self._seen_at |= dict.fromkeys(said, now)
        is_awaited = any(name not in said and now - at < RETURN_S for name, at in self._seen_at.items())
        return None if is_awaited or not all(said.values()) else next(iter(said.values()), None)

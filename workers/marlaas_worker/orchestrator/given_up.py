"""Whether the trainers of a job's pool have all given the job up. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import JobDocument, ReplicaReport

RETURN_S = 120.0
"""How long a trainer whose report is gone is expected back: a pool that changes replaces its trainers one after the other, and each loads its model."""


@dataclass(slots=True)
class GivenUp:
    """Remembers which trainers of the pool were there lately, by name; times are the caller's, in seconds."""

    _seen_at: dict[str, float] = field(default_factory=dict)

    def words(self, document: JobDocument, reports: Iterable[ReplicaReport], now: float) -> str | None:
        """The words of one trainer, once every trainer that reports, or that is expected back, has given the job up."""
        trainers = [report for report in reports if report.role == "trainer" and report.pool == document.pool]
        said = {report.replica: report.broken.get(document.uid) for report in trainers}
        self._seen_at |= dict.fromkeys(said, now)
        is_awaited = any(name not in said and now - at < RETURN_S for name, at in self._seen_at.items())
        return None if is_awaited or not all(said.values()) else next(iter(said.values()), None)

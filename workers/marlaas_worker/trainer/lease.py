"""Rules for taking an agent's lease, as functions of its policy record; `commit.PolicyKey.bind` writes the record."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import PolicyRecord

GRACE_S = 6.0
"""Seconds that a holder's report must be missing before its lease is free: three report intervals, in addition to the report's own lifetime.
After an outage of the bus all reports are gone at once; the grace period keeps the leases of running trainers."""


def bound_record(current: PolicyRecord | None, uid: str, holder: str) -> PolicyRecord:
    """Return the record that a bind writes: the epoch is incremented; a new job of the same name starts from an empty record."""
    epoch = 0 if current is None else current.epoch + 1
    if current is None or current.uid != uid:
        return PolicyRecord(uid=uid, epoch=epoch, holder=holder)
    return current.model_copy(update={"epoch": epoch, "holder": holder})


@dataclass(slots=True)
class Absences:
    """Time since which each lease holder has had no live report, by the observer's clock."""

    _since: dict[str, float] = field(default_factory=dict)

    def observe(self, holders: Iterable[str], live: Iterable[str], now: float) -> None:
        """Record one successful read of the reports."""
        absent = set(holders) - set(live)
        self._since = {holder: self._since.get(holder, now) for holder in absent}

    def forget(self) -> None:
        """Discard all absences after a failed read, which shows nothing about other trainers."""
        self._since.clear()

    def gone(self, holder: str, now: float) -> bool:
        """Return whether a holder has been absent for the whole grace period."""
        return holder in self._since and now - self._since[holder] >= GRACE_S


def may_bind(current: PolicyRecord | None, uid: str, name: str, holder_gone: bool) -> bool:
    """Return whether the trainer `name` may take the lease: it is free for this job, `name` holds it, or its holder is gone."""
    if current is None or current.uid != uid:
        return True
    return current.holder in ("", name) or holder_gone

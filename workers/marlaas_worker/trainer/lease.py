"""Who may train an agent, as a function of its policy record; the compare-and-set that makes it so is `binding`'s."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import PolicyRecord

GRACE_S = 6.0
"""How long a holder's report must be missing before its lease is free: three reports' time on top of the report's own lifetime,
so that an outage of the bus, after which all reports are gone at once, takes no lease from a living trainer."""


def bound_record(current: PolicyRecord | None, uid: str, holder: str) -> PolicyRecord:
    """The record that a bind writes: epoch one up, everything else as it is, or afresh for another job of the same name."""
    epoch = 0 if current is None else current.epoch + 1
    if current is None or current.uid != uid:
        return PolicyRecord(uid=uid, epoch=epoch, holder=holder)
    return current.model_copy(update={"epoch": epoch, "holder": holder})


@dataclass(slots=True)
class Absences:
    """Since when the holders of leases have had no live report; times are the observer's own."""

    _since: dict[str, float] = field(default_factory=dict)

    def observe(self, holders: Iterable[str], live: Iterable[str], now: float) -> None:
        """Note one successful look at the reports."""
        absent = set(holders) - set(live)
        self._since = {holder: self._since.get(holder, now) for holder in absent}

    def forget(self) -> None:
        """A look failed: what we did not see says nothing about others."""
        self._since.clear()

    def gone(self, holder: str, now: float) -> bool:
        """Whether a holder has been absent for the whole grace period."""
        return holder in self._since and now - self._since[holder] >= GRACE_S


def may_bind(current: PolicyRecord | None, uid: str, name: str, holder_gone: bool) -> bool:
    """Whether the trainer `name` may take the lease: nobody holds it for this job, it holds it itself, or its holder is gone."""
    if current is None or current.uid != uid:
        return True
    return current.holder in ("", name) or holder_gone

"""Seconds for which the adapter versions of each job had slots of this engine. Pure; the caller passes the clock."""

from collections.abc import Collection


class SlotSeconds:
    """Totals since the role's start, by job uid. A version counts from the begin of its load until its slot is free."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._began: dict[str, tuple[str, float]] = {}

    def begin(self, name: str, uid: str, now: float) -> None:
        """Note that a version of a job has taken a slot. name: of the version in the engine."""
        self._began[name] = uid, now

    def end(self, name: str, now: float) -> None:
        """Note that a version's slot is free; does nothing if it was already."""
        if name in self._began:
            uid, began = self._began.pop(name)
            self._ended[uid] = self._ended.get(uid, 0.0) + now - began

    def end_all(self, now: float) -> None:
        """Note that all slots are free, because the engine has stopped."""
        for name in list(self._began):
            self.end(name, now)

    def totals(self, now: float) -> dict[str, float]:
        """Return the totals up to now."""
        totals = dict(self._ended)
        for uid, began in self._began.values():
            totals[uid] = totals.get(uid, 0.0) + now - began
        return totals

    def forget(self, uids: Collection[str]) -> None:
        """Remove the totals of jobs that are gone. If their versions still have slots, no job is charged for them."""
        self._ended = {uid: seconds for uid, seconds in self._ended.items() if uid not in uids}
        self._began = {name: one for name, one in self._began.items() if one[0] not in uids}

"""Requeue times. Pure: the time is an argument."""


def soonest(*waits_s: float | None) -> float | None:
    """Return the shortest of the given waits, at least 0; None if all are None."""
    known = [max(0.0, wait) for wait in waits_s if wait is not None]
    return min(known, default=None)

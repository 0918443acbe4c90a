"""Times that a plan waits for. Pure: the time itself is always given."""


def soonest(*waits_s: float | None) -> float | None:
    """The shortest of the waits that there are, never negative; None if there are none."""
    known = [max(0.0, wait) for wait in waits_s if wait is not None]
    return min(known, default=None)

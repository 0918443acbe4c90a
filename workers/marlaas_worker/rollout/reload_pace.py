"""The time that re-loads of adapter versions may take in an engine, and how long a version in use keeps its slot.

Pure; the caller passes the clock, in seconds.
"""

MAX_RELOAD_SHARE = 0.02
MIN_QUANTUM_S, MAX_QUANTUM_S = 0.5, 10.0
_NEW_LOAD_WEIGHT = 0.2
_MAX_PRICE_S = MAX_RELOAD_SHARE * MAX_QUANTUM_S  # Slower loads exceed the share, so that no wait grows without bound.


class ReloadPace:
    """Mean time of a load, and the time that re-loads may take.

    Attributes:
        num_loads, num_reloads: loads of proven versions so far; `num_loads` includes the re-loads.
        load_s, reload_s: their total times in the engine.
    """

    def __init__(self) -> None:
        self.num_loads = self.num_reloads = 0
        self.load_s = self.reload_s = 0.0
        self._mean_s = 0.0
        self._balance_s = 0.0
        self._at = 0.0

    @property
    def quantum_s(self) -> float:
        """Seconds for which a version in use keeps its slot: one load is then at most `MAX_RELOAD_SHARE` of them."""
        return min(max(self._mean_s / MAX_RELOAD_SHARE, MIN_QUANTUM_S), MAX_QUANTUM_S)

    def delay_s(self, now: float) -> float:
        """Return the seconds until there is time for one more re-load; 0 if there is now."""
        self._advance(now)
        return max(0.0, self._price_s - self._balance_s) / MAX_RELOAD_SHARE

    def owes(self, now: float) -> bool:
        """Return whether re-loads have taken more than their time."""
        self._advance(now)
        return self._balance_s < 0

    def begin_reload(self, now: float) -> None:
        """Reserve the expected time of a re-load."""
        self._advance(now)
        self._balance_s -= self._price_s

    def note(self, seconds: float, *, is_reload: bool, now: float) -> None:
        """Record the time of a load; that of a re-load replaces what `begin_reload` has reserved."""
        self.num_loads += 1
        self.load_s += seconds
        if is_reload:
            self._advance(now)
            self.num_reloads += 1
            self.reload_s += seconds
            self._balance_s -= min(seconds, _MAX_PRICE_S) - self._price_s
        weight = _NEW_LOAD_WEIGHT if self.num_loads > 1 else 1.0
        self._mean_s += weight * (seconds - self._mean_s)

    @property
    def _price_s(self) -> float:
        return min(self._mean_s, _MAX_PRICE_S)

    def _advance(self, now: float) -> None:
        """Add the time that may be used since the last call. No more is saved up than one load needs."""
        earned = MAX_RELOAD_SHARE * max(0.0, now - self._at)
        self._balance_s = min(self._balance_s + earned, self._price_s)
        self._at = max(self._at, now)

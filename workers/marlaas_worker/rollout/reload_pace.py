"""The time that re-loads of adapter versions may take in an engine, and how long a version in use keeps its slot.

A re-load is the load of a version that has served requests and was evicted. While an adapter is loaded, the engine generates nothing.
A load costs its time multiplied by `busy`, the share of the engine's places that running requests have: only they are delayed. Pure; the caller passes the clock, in seconds.
"""

MAX_RELOAD_SHARE = 0.02
"""Re-loads cost at most this share of what the engine can do."""
MIN_BUSY = 0.2
"""Least share that counts while a request runs: so re-loads that take up to a second take at most MAX_RELOAD_SHARE / MIN_BUSY = 10 % of
an engine's time. Slower ones take more: one may begin every 10 s."""
MIN_QUANTUM_S, MAX_QUANTUM_S = 0.5, 10.0
MAX_CREDIT = 3
"""Unexpected re-loads that may begin before there is time for them."""
EXPECTED_S = 30.0
"""A re-load is expected for so long after the eviction of a version in use. Longer than nearly all waits for a slot."""
_NEW_LOAD_WEIGHT = 0.2
_ROUNDING_S = 1e-9
_MAX_COST_S = MAX_RELOAD_SHARE * MAX_QUANTUM_S  # Dearer loads exceed the share, so that no wait grows without bound.


class ReloadPace:
    """Mean time of a load, and the time that re-loads may take.

    num_places: requests that the engine runs at a time.

    Attributes:
        num_loads, num_reloads: loads of proven versions so far; `num_loads` includes the re-loads.
        load_s, reload_s: their total times in the engine.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self.num_loads = self.num_reloads = 0
        self.load_s = self.reload_s = 0.0
        self._mean_s = 0.0
        self._balance_s = 0.0
        self._at = 0.0
        self._evicted_at: dict[str, float] = {}

    def __str__(self) -> str:
        """Tell how often versions were loaded, and the engine's time for it; so that the share of re-loads can be checked."""
        loads = f"{self.num_loads} loads of adapter versions took {self.load_s:.3f} s of the engine's time"
        return f"{loads}; {self.num_reloads} of them were re-loads, which took {self.reload_s:.3f} s"

    @property
    def quantum_s(self) -> float:
        """Seconds for which a version in use keeps its slot: one load is then at most `MAX_RELOAD_SHARE` of them."""
        return min(max(self._mean_s / MAX_RELOAD_SHARE, MIN_QUANTUM_S), MAX_QUANTUM_S)

    def cost_s(self, busy: float = 1.0) -> float:
        """Return the expected cost of a re-load, in seconds of a full engine."""
        return min(self._mean_s * busy, _MAX_COST_S)

    def busy(self, num_running: int) -> float:
        """Return the share of the engine's places that count as in use: 0 if no request runs, otherwise at least MIN_BUSY."""
        return min(max(num_running / self._num_places, MIN_BUSY), 1.0) if num_running else 0.0

    def left_s(self, now: float, num_expected: int, busy: float = 1.0) -> float:
        """Return the time that is left for re-loads after so many expected ones; negative if they exceed the share.

        No more is saved up than one further load of a full engine needs; so much is there at the first load.
        """
        self._advance(now)
        if self.num_loads:
            self._balance_s = min(self._balance_s, (num_expected + 1) * self.cost_s())
        return self._balance_s - num_expected * self.cost_s(busy)

    def is_exceeded(self, now: float, num_expected: int, busy: float = 1.0) -> bool:
        """Return whether so many expected re-loads exceed the share."""
        return self.left_s(now, num_expected, busy) < -_ROUNDING_S

    def delay_s(self, now: float, num_expected: int, num_loads: int, busy: float = 1.0) -> float:
        """Return the seconds until there is time for so many re-loads besides the expected ones; 0 if there is now.

        num_loads: may be negative: minus the number of loads for which there need not be time yet.
        """
        missing_s = num_loads * self.cost_s(busy) - self.left_s(now, num_expected, busy)
        return missing_s / MAX_RELOAD_SHARE if missing_s > _ROUNDING_S else 0.0

    def expect(self, name: str, now: float) -> None:
        """Record that a version in use was evicted: it will be loaded again."""
        self._evicted_at[name] = now

    def expected(self, now: float) -> frozenset[str]:
        """Return the versions whose re-load is expected."""
        self._evicted_at = {name: at for name, at in self._evicted_at.items() if now < at + EXPECTED_S}
        return frozenset(self._evicted_at)

    def restart(self) -> None:
        """Drop the expected re-loads, after the engine has stopped."""
        self._evicted_at.clear()

    def add_load(self, name: str, seconds: float, now: float, *, is_reload: bool, busy: float = 1.0) -> None:
        """Record the time of a load. busy: when it began; at 0 it has delayed no request, and takes nothing of the share."""
        self._evicted_at.pop(name, None)
        self.num_loads += 1
        self.load_s += seconds
        if is_reload:
            self._advance(now)
            self.num_reloads += 1
            self.reload_s += seconds
            self._balance_s -= min(seconds * busy, _MAX_COST_S)
        weight = _NEW_LOAD_WEIGHT if self.num_loads > 1 else 1.0
        self._mean_s += weight * (seconds - self._mean_s)

    def _advance(self, now: float) -> None:
        """Add the time that may be used since the last call."""
        self._balance_s += MAX_RELOAD_SHARE * max(0.0, now - self._at)
        self._at = max(self._at, now)

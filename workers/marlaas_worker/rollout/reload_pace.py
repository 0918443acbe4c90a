"""Time budget for re-loads of adapter versions in an engine, and the time for which a version in use keeps its slot.

A re-load is the load of a version that has served requests and was evicted. During a load, the engine generates nothing.
That delays the running requests only. So a load costs its time multiplied by `busy`, the share of the engine's places that running
requests occupy: its cost is in seconds of a full engine. Pure; the caller passes the clock, in seconds.
"""

MAX_RELOAD_SHARE = 0.02
"""Most that re-loads may cost: 0.02 s of a full engine per second. A full engine runs as many requests as it has places."""
MIN_BUSY = 0.2
"""Least value of `busy` (share of the engine's places in use) while a request runs. So re-loads of up to a second each take at
most MAX_RELOAD_SHARE / MIN_BUSY = 10 % of an engine's time. Slower re-loads take more, because the cost of one is capped (`_MAX_COST_S`): one may
begin every 10 s."""
MIN_QUANTUM_S, MAX_QUANTUM_S = 0.5, 10.0
MAX_CREDIT = 3
"""Number of unexpected re-loads that may begin although the budget has no time for them yet."""
EXPECTED_S = 30.0
"""Seconds after the eviction of a version in use during which its re-load is expected. Longer than nearly all waits for a slot."""
_NEW_LOAD_WEIGHT = 0.2
_ROUNDING_S = 1e-9
_MAX_COST_S = MAX_RELOAD_SHARE * MAX_QUANTUM_S  # Costlier loads exceed the share, so that no wait grows without bound.


class ReloadPace:
    """Limits the rate of re-loads of adapter versions in an engine, and counts and times all loads.

    A re-load is the load of a version that has served requests and was evicted. It costs its duration times `busy`, the share of the
    engine's places that requests occupy. The budget for this cost grows by MAX_RELOAD_SHARE seconds each second.

    Args:
        num_places: most requests that the engine runs at a time.

    Attributes:
        num_loads: number of loads since the process started, re-loads included. Only loads of versions that were then proven count.
        num_reloads: number of re-loads among these loads.
        load_s: total duration of all `num_loads` loads, in seconds.
        reload_s: total duration of the re-loads among them, in seconds.
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
        """Return a sentence with the numbers of loads and re-loads and the engine's time for each, to check the share of re-loads."""
        loads = f"{self.num_loads} loads of adapter versions took {self.load_s:.3f} s of the engine's time"
        return f"{loads}; {self.num_reloads} of them were re-loads, which took {self.reload_s:.3f} s"

    @property
    def quantum_s(self) -> float:
        """Least seconds for which a version in use keeps its slot: the mean time of a load, divided by MAX_RELOAD_SHARE.

        At least MIN_QUANTUM_S, at most MAX_QUANTUM_S.
        """
        return min(max(self._mean_s / MAX_RELOAD_SHARE, MIN_QUANTUM_S), MAX_QUANTUM_S)

    def cost_s(self, busy: float = 1.0) -> float:
        """Return the expected cost of a re-load, in seconds of a full engine: the mean time of a load * busy, at most `_MAX_COST_S`.

        busy: share of the engine's places in use, from the method `busy`.
        """
        return min(self._mean_s * busy, _MAX_COST_S)

    def busy(self, num_running: int) -> float:
        """Return the share of the engine's places that counts as in use: 0 if no request runs, otherwise at least MIN_BUSY.

        num_running: number of requests that the engine runs.
        """
        return min(max(num_running / self._num_places, MIN_BUSY), 1.0) if num_running else 0.0

    def left_s(self, now: float, num_expected: int, busy: float = 1.0) -> float:
        """Return the budget that is left after the expected re-loads, in seconds of a full engine; negative if they exceed it.

        Unused budget accumulates up to the cost of `num_expected` + 1 re-loads in a full engine.

        Args:
            num_expected: number of re-loads for which time is set aside.
            busy: share of the engine's places in use, from the method `busy`.
        """
        self._advance(now)
        if self.num_loads:
            self._balance_s = min(self._balance_s, (num_expected + 1) * self.cost_s())
        return self._balance_s - num_expected * self.cost_s(busy)

    def is_exceeded(self, now: float, num_expected: int, busy: float = 1.0) -> bool:
        """Return whether `num_expected` re-loads exceed the budget. Arguments as of `left_s`."""
        return self.left_s(now, num_expected, busy) < -_ROUNDING_S

    def delay_s(self, now: float, num_expected: int, num_loads: int, busy: float = 1.0) -> float:
        """Return the seconds until the budget has time for `num_loads` re-loads besides the expected ones; 0 if it has time now.

        Args:
            num_expected: number of re-loads for which time is set aside.
            num_loads: if negative, the budget may be overdrawn by the cost of that many re-loads.
            busy: share of the engine's places in use, from the method `busy`.
        """
        missing_s = num_loads * self.cost_s(busy) - self.left_s(now, num_expected, busy)
        return missing_s / MAX_RELOAD_SHARE if missing_s > _ROUNDING_S else 0.0

    def expect(self, name: str, now: float) -> None:
        """Record that a version in use was evicted, so that its re-load is expected. name: the version's engine name."""
        self._evicted_at[name] = now

    def expected(self, now: float) -> frozenset[str]:
        """Return the engine names of the versions whose re-load is expected: evicted in use in the last EXPECTED_S, and not loaded since."""
        self._evicted_at = {name: at for name, at in self._evicted_at.items() if now < at + EXPECTED_S}
        return frozenset(self._evicted_at)

    def restart(self) -> None:
        """Drop the expected re-loads, after the engine has stopped."""
        self._evicted_at.clear()

    def add_load(self, name: str, seconds: float, now: float, *, is_reload: bool, busy: float = 1.0) -> None:
        """Record a finished load. A re-load is charged to the budget.

        Args:
            name: engine name of the version; its re-load is not expected any more.
            seconds: duration of the load.
            busy: share of the engine's places in use when the load began, from the method `busy`. 0: it delayed no request and costs nothing.
        """
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
        """Credit the time budget of re-loads with MAX_RELOAD_SHARE of the time since the last call."""
        self._balance_s += MAX_RELOAD_SHARE * max(0.0, now - self._at)
        self._at = max(self._at, now)

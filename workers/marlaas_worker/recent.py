"""Sums of recent amounts by key; an amount counts less with its age. Pure; the caller passes the clock, in seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class RecentSums:
    """Sums of amounts by key, in which an amount counts less with its age.

    Args:
        half_life_s: age in seconds at which an amount counts half.
        least: sums below it are dropped.
    """

    half_life_s: float
    least: float
    _sums: dict[str, float] = field(default_factory=dict)
    _at: float = 0.0

    def add(self, amounts: Mapping[str, float], now: float) -> None:
        """Add amounts, by key, to the sums. now: not before that of earlier calls."""
        self._sums = self.at(now)
        self._at = now
        for key, amount in amounts.items():
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Drop all keys for which `wanted` returns False."""
        self._sums = {key: total for key, total in self._sums.items() if wanted(key)}

    def at(self, now: float) -> dict[str, float]:
        """Return the sums by key at the time `now`."""
        factor = 0.5 ** ((now - self._at) / self.half_life_s)
        return {key: total * factor for key, total in self._sums.items() if total * factor >= self.least}

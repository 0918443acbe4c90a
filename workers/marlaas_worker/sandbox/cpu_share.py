"""CPU share of a job's environments on a machine that many jobs share: full while they use little CPU time, else low. Pure.

Most environments compute for milliseconds in an episode. With a low share, this would take long beside a busy engine, and the whole
step would wait for it. An environment that computes for long must not take the CPU from engine and trainer.
"""

from dataclasses import dataclass

ALLOWANCE = 0.1
"""CPU seconds per second that environments of one job may use with a full share."""
BURST_S = 0.5
"""Largest credit of the environments of one job, and their largest debt, in CPU seconds."""


@dataclass(slots=True)
class CpuShare:
    """Credit of CPU time of a job's environments, which grows by `ALLOWANCE` each second and shrinks by the CPU time that they use.

    The share becomes low when the credit falls below 0, and full again when the credit has reached half of `BURST_S`.

    Attributes:
        at: time of the last `note`, at first of the creation, in seconds of any clock.
        is_low: whether the share is low now.
    """

    at: float
    is_low: bool = False
    _credit_s: float = BURST_S
    _used_s: float = 0.0

    def note(self, used_s: float, now: float) -> bool:
        """Update the credit and return whether the share is low from now on.

        used_s: CPU seconds that the environments have used so far, in total. now: time on the clock of `at`.
        """
        used_s = max(used_s, self._used_s)  # a process that has exited is counted when its parent exits
        credit_s = self._credit_s + (now - self.at) * ALLOWANCE - (used_s - self._used_s)
        self._credit_s, self._used_s, self.at = min(max(credit_s, -BURST_S), BURST_S), used_s, now
        self.is_low = self._credit_s < (BURST_S / 2 if self.is_low else 0.0)
        return self.is_low

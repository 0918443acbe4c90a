"""How much time of a turn counts. Pure: the caller brings the clock.

Invariant: only time in which the engine generates, or in which the turn fails and is asked for again, counts against `turnTimeoutSeconds`. All
other time is waiting (for a place in the engine, an adapter's slot, a replica that restarts) and has a bound of its own.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class TurnClock:
    """Seconds of one turn, by what they were spent on. `at`: the time up to which they are counted.

    running_s: of the generation under way; None while there is none. failed_s: generations that failed, and the time from a failure to the next
    heartbeat. A generation that an engine's or a replica's end cuts off is forgotten: the next one has the whole time again.
    """

    timeout_s: float
    wait_s: float
    at: float
    waited_s: float = 0.0
    failed_s: float = 0.0
    running_s: float | None = None
    _fails: bool = False

    @property
    def counts(self) -> bool:
        """Whether time counts against the turn's timeout now."""
        return self._fails or self.running_s is not None

    @property
    def left_s(self) -> float:
        """Seconds until the turn's timeout, or until the end of waiting, whichever the present time counts against."""
        if self.counts:
            return self.timeout_s - self.failed_s - (self.running_s or 0.0)
        return self.wait_s - self.waited_s

    def advance(self, now: float) -> None:
        """Count the time up to now."""
        elapsed, self.at = now - self.at, now
        if self.running_s is not None:
            self.running_s += elapsed
        elif self._fails:
            self.failed_s += elapsed
        else:
            self.waited_s += elapsed

    def beat(self, running_s: float | None, now: float) -> None:
        """A replica says for how long the engine has generated; None: the turn waits."""
        self.advance(now)
        self.running_s, self._fails = running_s, False

    def failed(self, waits: bool, now: float) -> None:
        """The turn failed and is asked for again. waits: for lack of a place, which is waiting."""
        self.advance(now)
        if not waits:
            self.failed_s += self.running_s or 0.0
        self.running_s, self._fails = None, not waits

    def silent(self, now: float) -> None:
        """The replica is not heard of any more: until another one is, the turn waits."""
        self.advance(now)
        self.running_s, self._fails = None, False

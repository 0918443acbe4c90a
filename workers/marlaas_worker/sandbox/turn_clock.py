"""Which time of a turn counts against its timeout, and which against its limit of waiting. Pure; the caller passes the clock, in seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class TurnClock:
    """Seconds of one turn, by category. The caller passes the time.

    Only time in which the engine generates, or in which the turn fails and is retried, counts against
    `turnTimeoutSeconds`. All other time is waiting (for a place in the engine, an adapter's slot, a replica that
    restarts) and has its own limit.

    A generation that was cut off because its engine or replica stopped is not counted: the next one has the
    whole timeout again.

    Attributes:
        timeout_s: limit of the time that counts (turnTimeoutSeconds).
        wait_s: limit of the waiting time.
        at: clock time up to which seconds are counted so far; at first, the start of the turn.
        waited_s: waiting time so far.
        running_s: seconds of the generation in progress; None if there is none.
        failed_s: seconds of failed generations, and from a failure to the next heartbeat.
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
        """Whether the present time counts against `timeout_s`; else it counts against `wait_s`."""
        return self._fails or self.running_s is not None

    @property
    def left_s(self) -> float:
        """Seconds left at `at` of `timeout_s` while `counts`, else of `wait_s`; negative once the limit is exceeded."""
        if self.counts:
            return self.timeout_s - self.failed_s - (self.running_s or 0.0)
        return self.wait_s - self.waited_s

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        elapsed, self.at = now - self.at, now
        if self.running_s is not None:
            self.running_s += elapsed
        elif self._fails:
            self.failed_s += elapsed
        else:
            self.waited_s += elapsed

    def beat(self, running_s: float | None, now: float) -> None:
        """Record a heartbeat. running_s: how long the engine has generated; None: the turn waits."""
        self.advance(now)
        self.running_s, self._fails = running_s, False

    def failed(self, waits: bool, now: float) -> None:
        """Record a failure, after which the turn is retried.

        waits: it failed because the engine had no place for it. The time until the next heartbeat then counts as waiting, and the
            generation so far is not counted. Else both count against `timeout_s`.
        """
        self.advance(now)
        if not waits:
            self.failed_s += self.running_s or 0.0
        self.running_s, self._fails = None, not waits

    def silent(self, now: float) -> None:
        """Record that the replica has gone silent: the turn waits until a replica replies."""
        self.advance(now)
        self.running_s, self._fails = None, False

"""What follows from a role's death: start it again after a while, or give up. Pure.

A life counts as good if the process was ready and lived for a while after that. Bad lives in a row add up: dying before being ready
is the sign of a setting that cannot work, so few of them are enough; being killed is not, so it counts like a short life. A role that
says that only a person can help is given up at once, ready or not: one that makes no reports counts as ready after a while, and on a slow
machine it has not even looked at its settings then. Only after a good life it gets one more.
"""

from dataclasses import dataclass, replace

GOOD_LIFE_S = 30.0
MAX_STILLBORN = 3
MAX_SHORT = 8
MAX_DELAY_S = 30.0
EXIT_INVALID = 2
"""Exit code by which a role says that only a person can help (`InvalidInput`)."""


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One process from start to end; exit_code as of `subprocess` (negative: the signal), ready_at None: never ready. Seconds."""

    ended_at: float
    ready_at: float | None
    exit_code: int

    @property
    def good(self) -> bool:
        """It had been at work for a while."""
        return self.ready_at is not None and self.ended_at - self.ready_at >= GOOD_LIFE_S

    @property
    def never_ready(self) -> bool:
        """It ended by itself before it was ready."""
        return self.ready_at is None and self.exit_code >= 0


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Bad lives of one process in a row."""

    never_ready: int = 0
    short: int = 0
    invalid: bool = False

    @property
    def in_a_row(self) -> int:
        """All of them together."""
        return self.never_ready + self.short

    @property
    def gives_up(self) -> bool:
        """Starting it again will not help."""
        return self.invalid or self.never_ready >= MAX_STILLBORN or self.short >= MAX_SHORT

    @property
    def delay_s(self) -> float:
        """How long to wait before starting it again: nothing after a good life, then 1, 2, 4, …"""
        return min(MAX_DELAY_S, 2.0 ** (self.in_a_row - 1)) if self.in_a_row else 0.0


def after(backoff: RestartBackoff, life: ProcessRun) -> RestartBackoff:
    """Add one more life."""
    if life.exit_code == EXIT_INVALID and not life.good:
        return replace(backoff, never_ready=backoff.never_ready + 1, invalid=True)
    if life.good:
        return RestartBackoff()
    if life.never_ready:
        return replace(backoff, never_ready=backoff.never_ready + 1)
    return replace(backoff, short=backoff.short + 1)

"""Decides after a role process exits whether and when to start it again. Pure.

A run of a process is good if the process stayed ready for 30 s. Bad runs in a row are counted. Exits before being
ready hint at a wrong setting, so 3 of them are the limit. A process that is killed by a signal before being ready
counts as a short run, with a limit of 8. A role that exits with EXIT_INVALID is given up at once, whether ready or
not: a role without reports counts as ready after a while, and on a slow machine it has not read its settings by
then. Only after a good run it is restarted once more.
"""

from dataclasses import dataclass, replace

GOOD_LIFE_S = 30.0
MAX_STILLBORN = 3
MAX_SHORT = 8
MAX_DELAY_S = 30.0
EXIT_INVALID = 2
"""Exit code of a role that only a user can fix (`InvalidInput`)."""


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One run of a process. Times are seconds; `ready_at` None: it was never ready.

    `exit_code` is as in `subprocess` (negative: the signal).
    """

    ended_at: float
    ready_at: float | None
    exit_code: int

    @property
    def good(self) -> bool:
        """Whether the process stayed ready for GOOD_LIFE_S."""
        return self.ready_at is not None and self.ended_at - self.ready_at >= GOOD_LIFE_S

    @property
    def never_ready(self) -> bool:
        """Whether the process exited by itself before it was ready."""
        return self.ready_at is None and self.exit_code >= 0


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Counts of consecutive bad runs of one process."""

    never_ready: int = 0
    short: int = 0
    invalid: bool = False

    @property
    def in_a_row(self) -> int:
        """Number of consecutive bad runs."""
        return self.never_ready + self.short

    @property
    def gives_up(self) -> bool:
        """Whether the process is not to be started again."""
        return self.invalid or self.never_ready >= MAX_STILLBORN or self.short >= MAX_SHORT

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next start: 0 after a good run, then 1, 2, 4, … up to 30."""
        return min(MAX_DELAY_S, 2.0 ** (self.in_a_row - 1)) if self.in_a_row else 0.0


def after(backoff: RestartBackoff, life: ProcessRun) -> RestartBackoff:
    """Return the backoff after one more run."""
    if life.exit_code == EXIT_INVALID and not life.good:
        return replace(backoff, never_ready=backoff.never_ready + 1, invalid=True)
    if life.good:
        return RestartBackoff()
    if life.never_ready:
        return replace(backoff, never_ready=backoff.never_ready + 1)
    return replace(backoff, short=backoff.short + 1)

"""Restart limit for jobs whose task failed with an unexpected error. Other jobs are not affected. Pure.

Such an error may be transient (an exception that a library did not handle), or recur with the job's records
for ever. So a job is restarted after a pause, and a limited number of times.
"""

from collections.abc import Container
from dataclasses import dataclass, field

MAX_CRASHES = 3
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Crash:
    number: int
    finished: int
    at: float


@dataclass(slots=True)
class JobRestarts:
    """Consecutive crashes by job uid; a step finished in between resets the count. Times: seconds on the caller's clock."""

    _last: dict[str, _Crash] = field(default_factory=dict)

    def note(self, uid: str, finished: int, now: float) -> bool:
        """Note a crash of a job's task; return whether the job may be restarted.

        Args:
            finished: number of the job's finished steps.
        """
        last = self._last.get(uid)
        number = last.number + 1 if last is not None and last.finished == finished else 1
        self._last[uid] = _Crash(number, finished, now)
        return number < MAX_CRASHES

    def is_pausing(self, uid: str, now: float) -> bool:
        """Return whether the pause after a job's last crash still lasts. A clock that was set back shortens the pause."""
        last = self._last.get(uid)
        return last is not None and 0 <= now - last.at < PAUSE_S

    def keep(self, uids: Container[str]) -> None:
        """Remove all other jobs."""
        self._last = {uid: last for uid, last in self._last.items() if uid in uids}

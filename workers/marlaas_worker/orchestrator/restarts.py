"""Jobs whose own task died of an error that nobody foresaw: each is taken up anew, after a pause and within a bound; no other job notices. Pure.

Such an error may have passed by the next time (a library that let something through), or come again with what is on record for ever.
"""

from collections.abc import Container
from dataclasses import dataclass, field

MOST_DEATHS = 3
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Crash:
    number: int
    finished: int
    at: float


@dataclass(slots=True)
class JobRestarts:
    """Deaths in a row by job uid; a step that was finished in between ends the row. Times are the caller's, in seconds."""

    _last: dict[str, _Crash] = field(default_factory=dict)

    def note(self, uid: str, finished: int, now: float) -> bool:
        """A job's task died with so many steps finished; whether it may be taken up once more."""
        last = self._last.get(uid)
        number = last.number + 1 if last is not None and last.finished == finished else 1
        self._last[uid] = _Crash(number, finished, now)
        return number < MOST_DEATHS

    def rests(self, uid: str, now: float) -> bool:
        """Whether it is too early to take the job up again; a clock that was set back shortens the pause."""
        last = self._last.get(uid)
        return last is not None and 0 <= now - last.at < PAUSE_S

    def keep(self, uids: Container[str]) -> None:
        """Forget all other jobs."""
        self._last = {uid: last for uid, last in self._last.items() if uid in uids}

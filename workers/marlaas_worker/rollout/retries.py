"""Backoff for failed loads: retry times, and permanent refusals. Pure: the caller passes the clock."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.errors import Retryable

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """The last failed attempt. retry_at: when the next attempt is due; None: never."""

    error: Exception
    attempts: int
    retry_at: float | None


@dataclass(slots=True)
class Retries:
    """Failures by name, kept until an attempt succeeds or `clear` is called."""

    _troubles: dict[str, Trouble] = field(default_factory=dict)

    def failed(self, name: str, error: Exception, now: float) -> Trouble:
        """Note a failed attempt. Only a Retryable error is retried, with exponential backoff up to LONGEST_WAIT_S."""
        attempts = self._troubles[name].attempts + 1 if name in self._troubles else 1
        wait_s = min(FIRST_WAIT_S * 2 ** min(attempts - 1, 10), LONGEST_WAIT_S)
        retry_at = now + wait_s if isinstance(error, Retryable) else None
        self._troubles[name] = Trouble(error, attempts, retry_at)
        return self._troubles[name]

    def succeeded(self, name: str) -> None:
        """Forget a name's failures."""
        self._troubles.pop(name, None)

    def clear(self) -> None:
        """Forget all failures."""
        self._troubles.clear()

    def trouble(self, name: str) -> Trouble | None:
        """Return the last failure since the last success; None if there is none."""
        return self._troubles.get(name)

    def refusal(self, name: str) -> Exception | None:
        """Return the permanent error of a name that is never retried; None if an attempt is allowed."""
        trouble = self._troubles.get(name)
        return trouble.error if trouble is not None and trouble.retry_at is None else None

    def may_try(self, name: str, now: float) -> bool:
        """Return whether an attempt is due."""
        trouble = self._troubles.get(name)
        return trouble is None or (trouble.retry_at is not None and trouble.retry_at <= now)

    def next_in_s(self, names: Iterable[str], now: float) -> float | None:
        """Return the seconds until the first retry of these names is due; None if none of them waits for a retry."""
        troubles = (self._troubles.get(name) for name in names)
        due = [trouble.retry_at - now for trouble in troubles if trouble is not None and trouble.retry_at is not None]
        return max(0.0, min(due)) if due else None

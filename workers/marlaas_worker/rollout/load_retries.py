"""Failed loads of adapter versions, and when they are tried again. The caller passes the clock, in seconds."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from marlaas_api.bus import BusRefused
from marlaas_api.errors import Retryable
from marlaas_worker.rollout.slots import is_of

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""First and longest backoff after a failed load."""


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """The last failed attempt. retry_at: when the next attempt is due; None: never."""

    error: Exception
    attempts: int
    retry_at: float | None


@dataclass(slots=True)
class Retries:
    """Failed loads by version, kept until an attempt succeeds or `clear` is called. The caller passes the clock."""

    _failures: dict[str, FailedLoad] = field(default_factory=dict)

    def failed(self, name: str, error: Exception, now: float) -> FailedLoad:
        """Note a failed attempt. It is retried with exponential backoff up to LONGEST_WAIT_S, unless the version is at fault."""
        attempts = self._failures[name].attempts + 1 if name in self._failures else 1
        wait_s = min(FIRST_WAIT_S * 2 ** min(attempts - 1, 10), LONGEST_WAIT_S)
        retry_at = now + wait_s if not _is_of_version(error) else None
        self._failures[name] = FailedLoad(error, attempts, retry_at)
        return self._failures[name]

    def succeeded(self, name: str) -> None:
        """Forget a name's failures."""
        self._failures.pop(name, None)

    def forget(self, uids: Collection[str]) -> None:
        """Forget the failures of jobs that are gone."""
        for name in [name for name in self._failures if is_of(name, uids)]:
            del self._failures[name]

    def clear(self) -> None:
        """Forget all failures."""
        self._failures.clear()

    def failure(self, name: str) -> FailedLoad | None:
        """Return the last failure since the last success; None if there is none."""
        return self._failures.get(name)

    def may_try(self, name: str, now: float) -> bool:
        """Return whether an attempt is due."""
        failure = self._failures.get(name)
        return failure is None or (failure.retry_at is not None and failure.retry_at <= now)

    def next_in_s(self, names: Iterable[str], now: float) -> float | None:
        """Return the seconds until the first retry of these names is due; None if none of them waits for a retry."""
        failures = (self._failures.get(name) for name in names)
        due = [failure.retry_at - now for failure in failures if failure is not None and failure.retry_at is not None]
        return max(0.0, min(due)) if due else None


def _is_of_version(error: Exception) -> bool:
    """Return whether every attempt fails. Refused credentials are renewed; files, memory and threads are of this machine."""
    return not isinstance(error, Retryable | BusRefused | OSError | MemoryError | RuntimeError)

"""The retry loop of all roles: repeat a call until it succeeds, with exponential backoff."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from marlaas_api.errors import MarlaasError, Retryable, Unreadable

SERIES_S = 60.0
"""A failure after a call that has run for longer does not belong to the failures before it: its pause is the first one again."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def may_pass(error: MarlaasError) -> bool:
    """Return whether the same process may succeed later. Another process may be able to read an unreadable document."""
    return isinstance(error, Retryable) and not isinstance(error, Unreadable)


async def patiently(  # noqa: PLR0913 (the last three are keyword-only)
    call: Callable[[], Awaitable[T]],
    what: str,
    retry_s: float,
    *,
    longest_s: float | None = None,
    level: int = logging.WARNING,
    retried: Callable[[MarlaasError], bool] = may_pass,
) -> T:
    """Call until it does not raise an error that is retried; log the first failure, and each one of another type than before.

    Args:
        what: names the call in the log.
        retry_s: first pause. Each further pause is twice as long, up to `longest_s`; None: all pauses are equal.
        level: of these failures in the log; the others are logged for debugging.
        retried: returns whether an error is retried; the others are raised.
    """
    clock = asyncio.get_running_loop().time
    pause_s, logged = retry_s, None
    while True:
        began = clock()
        try:
            return await call()
        except MarlaasError as error:
            if not retried(error):
                raise
            if clock() - began > SERIES_S:
                pause_s, logged = retry_s, None
            log.log(level if type(error) is not logged else logging.DEBUG, "%s: %s; retrying", what, error)
            logged = type(error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s or pause_s)

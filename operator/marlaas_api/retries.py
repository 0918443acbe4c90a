"""The retry loop of all roles: repeat a call until it succeeds, with exponential backoff."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from marlaas_api.errors import Retryable, Unreadable

log = logging.getLogger(__name__)
T = TypeVar("T")


async def patiently(
    call: Callable[[], Awaitable[T]],
    what: str,
    retry_s: float,
    *,
    longest_s: float | None = None,
    level: int = logging.WARNING,
) -> T:
    """Call until it does not raise Retryable; log the first failure.

    Args:
        what: names the call in the log.
        retry_s: first pause. Each further pause is twice as long, up to `longest_s`; None: all pauses are equal.
        level: of the first failure in the log; the others are logged for debugging.

    Raises:
        Unreadable: another process may be able to read the document.
    """
    pause_s = retry_s
    while True:
        try:
            return await call()
        except Unreadable:
            raise
        except Retryable as error:
            log.log(level, "%s: %s; retrying", what, error)
            level = logging.DEBUG
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s or pause_s)

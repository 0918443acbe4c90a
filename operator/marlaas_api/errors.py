"""Base classes of all errors: every failure is either Retryable or Permanent."""

from typing import ClassVar

from marlaas_api.reasons import Reason


class MarlaasError(Exception):
    """Base of every error that MARLaaS raises on purpose; its text is for the person who has to act."""


class Retryable(MarlaasError):
    """The same call may succeed later (a server restarting, a queue full).

    reason: shown by a job that waits for it; None: it passes too soon to be shown.
    """

    reason: ClassVar[Reason | None] = None


class Permanent(MarlaasError):
    """The same call never succeeds unless a person or another component changes something first."""


class InvalidInput(Permanent):
    """Invalid input from a person (manifest, flag, argument); the text gives the place and the expected value."""


class Unreadable(Retryable):
    """A stored document or message that this release cannot parse. It is not absent: wait, and delete nothing because of it."""

    reason = Reason.UNREADABLE


class UnsupportedSchema(Unreadable):
    """A newer MARLaaS wrote the message; this worker cannot read it."""


def first_cause(error: BaseException) -> BaseException:
    """Return the error, or the first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

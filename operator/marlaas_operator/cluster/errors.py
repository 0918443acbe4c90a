"""Errors of the API server, as Retryable or Permanent.

The text is the request, followed by the server's own message.
"""

from marlaas_api.errors import Permanent, Retryable


class Unavailable(Retryable):
    """The server failed: 5xx, a broken connection, no reply in time, or a credential that is being renewed."""


class NoAnswer(Unavailable):
    """No connection, or no reply in time: other requests would most likely fail too."""


class TooMany(Retryable):
    """429: too many requests. retry_after_s: the server's Retry-After, 1 without it."""

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Conflict(Retryable):
    """409: the object changed since it was observed. Observe again, then plan again."""


class AlreadyExists(Conflict):
    """409 on create: the object exists already."""


class Gone(Retryable):
    """410: the resource version or the continue token has expired. List again."""


class Terminating(Retryable):
    """403 because the namespace is being deleted: no object can be created in it."""


class NotFound(Permanent):
    """404: the object, its namespace or its kind does not exist."""


class Invalid(Permanent):
    """422 or 400: the server refuses the content."""


class Forbidden(Permanent):
    """403: refused by RBAC, admission or a quota; a person must change the configuration."""

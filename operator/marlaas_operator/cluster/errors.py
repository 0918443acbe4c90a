"""What the API server may answer instead of doing it, as our own errors: Retryable or Permanent.

The text is the server's own sentence, behind what was asked of it.
"""

from marlaas_api.errors import Permanent, Retryable


class Unavailable(Retryable):
    """No answer, or the server's own trouble: 5xx, a broken connection, no reply in time, a credential that is being renewed."""


class NoAnswer(Unavailable):
    """No connection, or no reply in time: most likely nobody there would take anything else either."""


class TooMany(Retryable):
    """429: the server asks for patience. retry_after_s: how much; 1 when it does not say."""

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Conflict(Retryable):
    """409: the object is not (any more) the one that was observed. Observe again, then decide anew."""


class AlreadyExists(Conflict):
    """409 on create: somebody made it before."""


class Gone(Retryable):
    """410: the server forgot that resource version. List again."""


class Terminating(Retryable):
    """403 because the namespace is being deleted: nothing can be made in it; it will be gone soon."""


class NotFound(Permanent):
    """404: the object, its namespace or its kind does not exist."""


class Invalid(Permanent):
    """422 or 400: the server refuses the content, with its sentence."""


class Forbidden(Permanent):
    """403: RBAC, admission or a quota; only a person can help."""

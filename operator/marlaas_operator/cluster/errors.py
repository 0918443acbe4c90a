"""Errors of the API server, as Retryable or Permanent, and their translation from the server's answers. Pure.

The text is the request, followed by the server's own message.
"""

import json
from http import HTTPStatus
from typing import Any

from marlaas_api.errors import MarlaasError, Permanent, Retryable


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


_LONGEST_WAIT_S = 60.0
_INVALID = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_BY_STATUS: dict[int, type[MarlaasError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.GONE: Gone,
    HTTPStatus.METHOD_NOT_ALLOWED: Invalid,
    HTTPStatus.NOT_ACCEPTABLE: Invalid,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: Invalid,
}
"""Statuses neither here nor in `api_error` (401, 499, 5xx, 520) become Unavailable: a proxy or the server failed."""


def api_error(status: int, text: bytes, tried: str, retry_after: str | None = None) -> MarlaasError:
    """Return the error for an HTTP status >= 400. tried: beginning of its message; text: the answer's body."""
    answer = _status_object(text)
    sentence = f"{tried}: {answer.get('message') or f'HTTP status {status}'}"
    if status == HTTPStatus.CONFLICT:
        return AlreadyExists(sentence) if answer.get("reason") == "AlreadyExists" else Conflict(sentence)
    if status == HTTPStatus.FORBIDDEN:
        return Terminating(sentence) if _has_cause(answer, "NamespaceTerminating") else Forbidden(sentence)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return TooMany(sentence, _seconds(retry_after))
    if status in _INVALID:
        return Conflict(sentence) if _other_uid(answer) else Invalid(sentence)
    return _BY_STATUS.get(status, Unavailable)(sentence)


def _status_object(text: bytes) -> dict[str, Any]:
    """Parse the server's Status; a plain text becomes its message."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text.decode(errors="replace").strip()[:500]}
    return answer if isinstance(answer, dict) else {}


def _has_cause(answer: dict[str, Any], reason: str) -> bool:
    causes = (answer.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == reason for cause in causes)


def _other_uid(answer: dict[str, Any]) -> bool:
    """Return whether a uid precondition failed: the server reports it as an attempt to change the uid."""
    causes = (answer.get("details") or {}).get("causes") or ()
    return any(cause.get("field") == "metadata.uid" for cause in causes)


def _seconds(retry_after: str | None) -> float:
    try:
        return min(max(float(retry_after or 1.0), 0.1), _LONGEST_WAIT_S)
    except ValueError:
        return 1.0

"""Translation of the API server's error answers to our errors. Pure."""

import json
from http import HTTPStatus
from typing import Any

from marlaas_api.errors import MarlaasError
from marlaas_operator.cluster.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Terminating,
    TooMany,
    Unavailable,
)

_LONGEST_WAIT_S = 60.0
_INVALID = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_BY_STATUS: dict[int, type[MarlaasError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.GONE: Gone,
    HTTPStatus.METHOD_NOT_ALLOWED: Invalid,
    HTTPStatus.NOT_ACCEPTABLE: Invalid,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: Invalid,
}
"""Statuses neither here nor in `verdict` (401, 499, 5xx, 520) become Unavailable: a proxy or the server failed."""


def verdict(status: int, text: bytes, tried: str, retry_after: str | None = None) -> MarlaasError:
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

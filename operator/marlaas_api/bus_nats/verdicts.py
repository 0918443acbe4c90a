"""Exceptions for the server's refusals: retryable, permanent, or a lost compare-and-set."""

from collections.abc import Mapping

from marlaas_api.bus import BusRefused, BusUnavailable, RevisionConflict, StreamFull

# Error codes of the JetStream API (nats-server, server/errors.json).
_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
_NO_STORAGE = frozenset({10023, 10028, 10047, 10072})
# A message with the same id is being stored; its sequence is not known yet. Only a replicated stream answers so, with 409.
_IN_PROCESS = 10158
# 10077 also reports other failures of the store; the error text identifies the limits (nats-server, server/store.go).
_STORE_FAILED = 10077
_LIMITS = ("maximum bytes exceeded", "maximum messages exceeded", "maximum messages per subject exceeded")
_DISK_FULL = ("no space left", "file too large", "disk quota")
_NO_MESSAGE = 10037
_NOT_FOUND = frozenset({10014, 10059})
# Configurations that the server never accepts; it answers 500, which would otherwise mean retryable.
_BAD_CONFIG = frozenset({10012, 10049, 10052, 10069})


class Missing(BusRefused):
    """The stream or consumer does not exist."""


class NoMessage(BusRefused):
    """The stream has no such message."""


class Lost(BusUnavailable):
    """The connection broke before the answer arrived; it is unknown whether the server acted on the request."""


class SubjectForbidden(BusRefused):
    """The user has no permission for the subject."""


def verdict(error: Mapping[str, object], action: str) -> BusUnavailable | BusRefused | RevisionConflict:
    """Return the exception for an `error` object of the JetStream API, received during `action`."""
    code, kind = error.get("code"), error.get("err_code")
    text = f"NATS: cannot {action}: {error.get('description', 'no reason given')}"
    if kind in _WRONG_LAST_SEQUENCE:
        return RevisionConflict(text)
    if kind == _STORE_FAILED and any(words in text for words in _LIMITS):
        return StreamFull(text)
    if kind in _NO_STORAGE or any(words in text for words in _DISK_FULL):
        return BusUnavailable(f"{text}: free disk space on the NATS server, or raise its storage limit")
    if kind == _NO_MESSAGE:
        return NoMessage(text)
    if kind in _NOT_FOUND:
        return Missing(text)
    if kind == _IN_PROCESS:
        return BusUnavailable(text)
    if kind not in _BAD_CONFIG and isinstance(code, int) and (code >= 500 or code == 429):
        return BusUnavailable(text)
    return BusRefused(text)

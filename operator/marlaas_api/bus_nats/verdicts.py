"""What the server's refusals mean to a caller: try again, do not, or somebody else was first."""

from collections.abc import Mapping

from marlaas_api.bus import BusRefused, BusUnavailable, RevisionConflict, StreamFull

# Error codes of the JetStream API (nats-server, server/errors.json).
_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
_NO_STORAGE = frozenset({10023, 10028, 10047, 10072})
# 10077 also reports other failures of the store; the limits are told apart by their words (nats-server, server/store.go).
_STORE_FAILED = 10077
_LIMITS = ("maximum bytes exceeded", "maximum messages exceeded", "maximum messages per subject exceeded")
_DISK_FULL = ("no space left", "file too large", "disk quota")
_NOT_FOUND = frozenset({10014, 10059})
# Configurations that the server will never take, although it answers 500.
_BAD_CONFIG = frozenset({10012, 10049, 10052, 10069})


class Missing(BusRefused):
    """The stream or consumer does not exist."""


class Lost(BusUnavailable):
    """The connection broke before the answer came; whether the server acted on the request is not known."""


class SubjectForbidden(BusRefused):
    """This user may not use that subject."""


def verdict(error: Mapping[str, object], action: str) -> BusUnavailable | BusRefused | RevisionConflict:
    """The exception for an `error` object of the JetStream API, met while doing `action`."""
    code, kind = error.get("code"), error.get("err_code")
    text = f"NATS: cannot {action}: {error.get('description', 'no reason given')}"
    if kind in _WRONG_LAST_SEQUENCE:
        return RevisionConflict(text)
    if kind == _STORE_FAILED and any(words in text for words in _LIMITS):
        return StreamFull(text)
    if kind in _NO_STORAGE or any(words in text for words in _DISK_FULL):
        return BusUnavailable(f"{text}: free disk space on the NATS server, or raise its storage limit")
    if kind in _NOT_FOUND:
        return Missing(text)
    if kind not in _BAD_CONFIG and isinstance(code, int) and (code >= 500 or code == 429):
        return BusUnavailable(text)
    return BusRefused(text)

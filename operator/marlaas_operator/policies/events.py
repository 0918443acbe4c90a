"""Events of an object, derived from a change of its status: one per transition.

They depend only on the stored and the new status, so that a restarted operator emits none twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from marlaas_api.reasons import Reason
from marlaas_operator.plan import Event
from marlaas_operator.policies.document_publishing import MISFITS
from marlaas_operator.policies.faults import FAULTS

_UNTOLD = frozenset({Reason.FINISHED, Reason.NOT_ADMITTED, Reason.DELETING, Reason.SUSPENDED})
"""Reasons of a condition that became false as a consequence of a change that has an event of its own."""
_SILENT = frozenset(("False", reason) for reason in _UNTOLD)
_ALARMS = frozenset({Reason.IN_USE, Reason.CONFLICTING_TENANTS, Reason.POOL_NOT_FOUND, Reason.UNSUPPORTED, *MISFITS})
"""Reasons that emit a Warning even if the condition's status did not change, because a person must act."""
_MOST_BYTES = 1000
"""Longest message; an event's note takes 1024 bytes."""
_BAD = frozenset({"Failed"})


def events(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the events for a status that changes from `before` to `after`; one per reason."""
    told: dict[str, Event] = {}
    for event in (*_faults(before or {}, after), *_turned(before or {}, after), *_moved(before or {}, after)):
        told.setdefault(event.reason, replace(event, message=_clipped(event.message)))
    return tuple(told.values())


def _faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for a fault that begins, changes or ends."""
    was, now = _trouble(before), _trouble(after)
    if now and now != was:
        yield Event("Warning", now, _message(after, now))
    if was and not now and after.get("phase") not in ("Failed", "Succeeded"):
        yield Event("Normal", Reason.RECOVERED, f"{was} is over")


def _turned(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for conditions that changed, or that have a new reason that a person must act on."""
    was = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    for condition in after.get("conditions") or ():
        status, reason = condition["status"], condition["reason"]
        old_status, old_reason = was.get(condition["type"], ("False", ""))
        alarming = reason in _ALARMS and reason != old_reason
        if (status == old_status and not alarming) or reason in FAULTS or (status, reason) in _SILENT:
            continue
        bad = condition["type"] in _BAD or reason in _ALARMS
        yield Event("Warning" if bad else "Normal", reason, condition["message"] or condition["type"])


def _moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for suspension and deletion, which no condition covers.

    A renewed admission emits the event of its own condition.
    """
    phases = (before.get("phase"), after.get("phase"))
    resting = phases[0] is not None and phases[0] != phases[1] and "Suspended" in phases
    resting = resting and not (_is_admitted(after) and not _is_admitted(before))
    going = after.get("reason") == Reason.DELETING != before.get("reason")
    if resting or going:
        yield Event("Normal", str(after.get("reason")), str(after.get("message") or after.get("reason")))


def _is_admitted(status: Mapping[str, Any]) -> bool:
    return any(c["type"] == "Admitted" and c["status"] == "True" for c in status.get("conditions") or ())


def _trouble(status: Mapping[str, Any]) -> str:
    """Return the fault in a status; empty if there is none.

    It is the status's reason, or (for kinds without one) that of a condition.
    """
    reasons = [status.get("reason"), *(condition["reason"] for condition in status.get("conditions") or ())]
    return next((str(reason) for reason in reasons if reason in FAULTS), "")


def _clipped(message: str) -> str:
    return message.encode()[:_MOST_BYTES].decode(errors="ignore")


def _message(status: Mapping[str, Any], reason: str) -> str:
    said = [(status.get("reason"), status.get("message"))]
    said += [(condition["reason"], condition["message"]) for condition in status.get("conditions") or ()]
    return next((str(text) for word, text in said if word == reason and text), reason)

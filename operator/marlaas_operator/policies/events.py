"""The story of an object: what a change of its status means, one event per real transition.

Computed from the stored status and the new one alone, so that an operator that starts again tells nothing twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from marlaas_api.reasons import Reason
from marlaas_operator.plan import Event
from marlaas_operator.policies.document_publishing import MISFITS
from marlaas_operator.policies.faults import FAULTS

_UNTOLD = frozenset({Reason.FINISHED, Reason.NOT_ADMITTED, Reason.DELETING, Reason.SUSPENDED})
"""Reasons of a condition that turned false as a mere consequence of what another sentence tells."""
_SILENT = frozenset(("False", reason) for reason in _UNTOLD)
_ALARMS = frozenset({Reason.IN_USE, Reason.CONFLICTING_TENANTS, Reason.POOL_NOT_FOUND, Reason.UNSUPPORTED, *MISFITS})
"""Reasons of a condition that somebody must act on, though it has not turned."""
_MOST_BYTES = 1000
"""An event's note takes 1024."""
_BAD = frozenset({"Failed"})


def events(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> tuple[Event, ...]:
    """What to tell when the status goes from before to after; one event per reason."""
    told: dict[str, Event] = {}
    for event in (*_faults(before or {}, after), *_turned(before or {}, after), *_moved(before or {}, after)):
        told.setdefault(event.reason, replace(event, message=_clipped(event.message)))
    return tuple(told.values())


def _faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """A fault begins, becomes another, or ends."""
    was, now = _trouble(before), _trouble(after)
    if now and now != was:
        yield Event("Warning", now, _message(after, now))
    if was and not now and after.get("phase") not in ("Failed", "Succeeded"):
        yield Event("Normal", Reason.RECOVERED, f"{was} is over")


def _turned(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """A condition turned, or is held up by something that somebody must hear of."""
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
    """The phase moved between waiting and resting, which no condition tells (one that was admitted anew does); or the object is about to go."""
    phases = (before.get("phase"), after.get("phase"))
    resting = phases[0] is not None and phases[0] != phases[1] and "Suspended" in phases
    resting = resting and not (_is_admitted(after) and not _is_admitted(before))
    going = after.get("reason") == Reason.DELETING != before.get("reason")
    if resting or going:
        yield Event("Normal", str(after.get("reason")), str(after.get("message") or after.get("reason")))


def _is_admitted(status: Mapping[str, Any]) -> bool:
    return any(c["type"] == "Admitted" and c["status"] == "True" for c in status.get("conditions") or ())


def _trouble(status: Mapping[str, Any]) -> str:
    """The fault that a status shows: as its reason, or (of kinds without one) as that of a condition; empty if there is none."""
    reasons = [status.get("reason"), *(condition["reason"] for condition in status.get("conditions") or ())]
    return next((str(reason) for reason in reasons if reason in FAULTS), "")


def _clipped(message: str) -> str:
    return message.encode()[:_MOST_BYTES].decode(errors="ignore")


def _message(status: Mapping[str, Any], reason: str) -> str:
    said = [(status.get("reason"), status.get("message"))]
    said += [(condition["reason"], condition["message"]) for condition in status.get("conditions") or ()]
    return next((str(text) for word, text in said if word == reason and text), reason)

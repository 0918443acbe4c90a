"""From an object's stored and computed status: the conditions, the merge patch, and the events. Pure.

Each condition has a reason and the observed generation; its transition time changes only with its status. There
is one event per transition; it depends only on the stored and the new status, so that a restarted operator emits
none twice.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from marlaas_api.reasons import Reason
from marlaas_operator.plan import Event
from marlaas_operator.policies.job_phase import MISFITS

_URGENT = ("phase", "reason", "conditions", "observedGeneration", "finishedAt")
_LONGEST_MESSAGE = 4096
HEALTHY = "Healthy"
"""Condition of a job: the figures of its last step and evaluation are within their bounds."""

RawCondition = Mapping[str, Any]

FAULTS = frozenset(
    {
        Reason.BUS_UNAVAILABLE,
        Reason.IMAGE_CANNOT_BE_PULLED,
        Reason.POD_UNSCHEDULABLE,
        Reason.POD_REFUSED,
        Reason.CONFIG_MISSING,
        Reason.MODEL_NOT_FOUND,
        Reason.CONTAINER_CRASHING,
        Reason.CONTAINER_OUT_OF_MEMORY,
        Reason.INVALID_SPEC,
    }
)
"""Reasons that are reported by a Warning event when they begin, and by `Recovered` when they end."""
_CONSEQUENCES = frozenset({Reason.FINISHED, Reason.NOT_ADMITTED, Reason.DELETING, Reason.SUSPENDED})
"""Reasons of a condition that became false as a consequence of a change that has an event of its own."""
_SILENT = frozenset(("False", reason) for reason in _CONSEQUENCES)
_UNHEALTHY = frozenset(
    {
        Reason.EVALUATION_OVERLAP,
        Reason.REPLIES_CUT,
        Reason.NO_SIGNAL,
        Reason.MIXED_GROUPS,
        Reason.ONE_PROMPT,
        Reason.ENGINE_MISMATCH,
        Reason.REPORT_DELAYED,
    }
)
_ALARMS = frozenset(
    {Reason.IN_USE, Reason.CONFLICTING_TENANTS, Reason.POOL_NOT_FOUND, Reason.UNSUPPORTED, *MISFITS, *_UNHEALTHY}
)
"""Reasons that emit a Warning even if the condition's status did not change, because a person must act."""
_LONGEST_EVENT_BYTES, _LONGEST_NOTE = 1000, 1024
"""Longest message in bytes, and longest note of an Event in characters."""
CONTROLLER = "marlaas.dev/operator"
_LONGEST_NAME = 220


def status_patch(
    before: Mapping[str, Any] | None, after: Mapping[str, Any], model: type[BaseModel]
) -> dict[str, Any] | None:
    """Return the complete status to write, with None for fields to remove; None if nothing differs.

    Fields that this version does not know stay: a newer operator may have written them.
    """
    stored = before or {}
    known = {info.alias or name for name, info in model.model_fields.items()}
    stale = [key for key in stored if key in known and key not in after]
    if not stale and all(stored.get(key) == value for key, value in after.items()):
        return None
    whole = {key: _merged(stored.get(key), value) for key, value in after.items()}
    return {**whole, **dict.fromkeys(stale)}


def is_urgent(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Return whether a field other than the numeric ones changed. The text of `Healthy` has the figures of each step."""
    stored = before or {}
    return any(_without_figures(stored.get(key)) != _without_figures(after.get(key)) for key in _URGENT)


def _without_figures(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{**one, "message": ""} if one.get("type") == HEALTHY else one for one in value]


def figure(value: float | None, digits: int) -> float | None:
    """Round a number for a status column; None for NaN and infinity, which JSON cannot represent."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def without_none(status: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the fields that are None."""
    return {key: value for key, value in status.items() if value is not None}


def _merged(before: Any, after: Any) -> Any:
    """Set keys that are no longer there to None: a merge patch keeps keys that it does not name."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return {**after, **{key: None for key in before if key not in after}}
    return after


@dataclass(frozen=True, slots=True)
class ConditionState:
    """Current state of one condition of an object."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def conditions(
    findings: Iterable[ConditionState], before: Iterable[RawCondition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions to store: one per finding, then those of other types, which other controllers own."""
    known = {str(condition.get("type")): condition for condition in before}
    ours = [_condition(finding, known.pop(finding.type, {}), generation, now) for finding in findings]
    return [*ours, *(dict(condition) for condition in known.values())]


def rfc3339(seconds: float) -> str:
    """Format unix seconds as Kubernetes does."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clipped(message: str) -> str:
    """Cut a message to the length that a status may have; an environment's error text may be very long."""
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 3]}..."


def _condition(finding: ConditionState, before: RawCondition, generation: int, now: float) -> dict[str, Any]:
    status = "True" if finding.holds else "False"
    moved = before.get("status") != status or "lastTransitionTime" not in before
    return {
        "type": finding.type,
        "status": status,
        "reason": str(finding.reason),
        "message": clipped(finding.message),
        "lastTransitionTime": rfc3339(now) if moved else before["lastTransitionTime"],
        "observedGeneration": generation,
    }


def events(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the events for a status that changes from `before` to `after`; one per reason."""
    found: dict[str, Event] = {}
    for event in (*_faults(before or {}, after), *_turned(before or {}, after), *_moved(before or {}, after)):
        found.setdefault(event.reason, replace(event, message=_cut(event.message)))
    return tuple(found.values())


def _faults(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for a fault that begins, changes or ends."""
    old, new = _fault(before), _fault(after)
    if new and new != old:
        yield Event("Warning", new, _fault_message(after, new))
    if old and not new and after.get("phase") not in ("Failed", "Succeeded"):
        yield Event("Normal", Reason.RECOVERED, f"{old} is over")


def _turned(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events for conditions that changed, or that have a new reason that a person must act on."""
    was = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    for condition in after.get("conditions") or ():
        status, reason = condition["status"], condition["reason"]
        old_status, old_reason = was.get(condition["type"], ("False", ""))
        alarming = reason in _ALARMS and reason != old_reason
        if (status == old_status and not alarming) or reason in FAULTS or (status, reason) in _SILENT:
            continue
        bad = condition["type"] == "Failed" or reason in _ALARMS
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


def _fault(status: Mapping[str, Any]) -> str:
    """Return the fault in a status; empty if there is none.

    It is the status's reason, or (for kinds without one) that of a condition.
    """
    reasons = [status.get("reason"), *(condition["reason"] for condition in status.get("conditions") or ())]
    return next((str(reason) for reason in reasons if reason in FAULTS), "")


def _cut(message: str) -> str:
    return message.encode()[:_LONGEST_EVENT_BYTES].decode(errors="ignore")


def _fault_message(status: Mapping[str, Any], reason: str) -> str:
    texts = [(status.get("reason"), status.get("message"))]
    texts += [(condition["reason"], condition["message"]) for condition in status.get("conditions") or ()]
    return next((str(text) for found, text in texts if found == reason and text), reason)


def event_bodies(
    regarding: Mapping[str, Any], events: Sequence[Event], instance: str, now: float
) -> list[dict[str, Any]]:
    """Return the Event objects about `regarding`, in order.

    An Event's name is derived from the observed object and the event, so that each is created only once. kubectl sorts
    Events by a timestamp that events.k8s.io/v1 may lack, and then by name; so the names are in chronological order.
    """
    return [_event_body(regarding, (place, event), instance, now) for place, event in enumerate(events)]


def _event_body(regarding: Mapping[str, Any], placed: tuple[int, Event], instance: str, now: float) -> dict[str, Any]:
    meta = regarding["metadata"]
    place, event = placed
    content = "|".join((meta["uid"], str(meta["resourceVersion"]), event.type, event.reason, event.message))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    name = f"{meta['name'][:_LONGEST_NAME]}.{int(meta['resourceVersion']):016x}{place:02x}{digest}"
    namespace = meta.get("namespace") or "default"
    reference = {
        "apiVersion": regarding["apiVersion"],
        "kind": regarding["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "eventTime": datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "regarding": reference | ({"namespace": meta["namespace"]} if meta.get("namespace") else {}),
        "action": event.reason,
        "reason": event.reason,
        "note": event.message[:_LONGEST_NOTE],
        "type": event.type,
    }

"""Conditions by the Kubernetes API conventions, and the merge patch from the stored to the computed status.

Each condition has a reason and the observed generation; its transition time changes only with its status.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

_URGENT = ("phase", "reason", "conditions", "observedGeneration", "finishedAt")


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
    """Return whether a field other than the numeric ones changed."""
    stored = before or {}
    return any(stored.get(key) != after.get(key) for key in _URGENT)


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


RawCondition = Mapping[str, Any]

_MOST_CHARS = 4096


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
    return message if len(message) <= _MOST_CHARS else f"{message[: _MOST_CHARS - 3]}..."


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

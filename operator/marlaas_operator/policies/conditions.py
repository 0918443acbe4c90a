"""Conditions by the Kubernetes API conventions.

Each has a reason and the observed generation; its transition time changes only with its status.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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

"""Conditions as the API conventions want them: a time that moves only with the status, the generation that was looked at, a reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

RawCondition = Mapping[str, Any]

_MOST_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ConditionState:
    """What is found of one aspect of an object now."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def conditions(
    findings: Iterable[ConditionState], before: Iterable[RawCondition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Conditions to store: one per finding, and after them those of other types that were there, which are somebody else's."""
    known = {str(condition.get("type")): condition for condition in before}
    ours = [_condition(finding, known.pop(finding.type, {}), generation, now) for finding in findings]
    return [*ours, *(dict(condition) for condition in known.values())]


def rfc3339(seconds: float) -> str:
    """Kubernetes' text of a time in unix seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clipped(message: str) -> str:
    """A message of a length that a status takes: an environment's own words may be a book."""
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

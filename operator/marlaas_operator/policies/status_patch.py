"""Merge patch from the stored to the computed status; None if they are equal. Pure."""

import math
from collections.abc import Mapping
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

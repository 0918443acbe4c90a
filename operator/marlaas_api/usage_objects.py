"""Usage in objects of Kubernetes: the `usage` of a status, and marks of a tenant's total over time in a ConfigMap. Pure.

The operator writes a mark every hour, and later keeps one per day. `kubectl marlaas usage --since` reads them: the usage of
a period is the difference of two totals.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.status import UsageStatus
from marlaas_api.messages import UsageAmounts

_SECONDS = {
    "engine_seconds": "engine_s",
    "preempted_engine_seconds": "preempted_engine_s",
    "trainer_seconds": "trainer_s",
    "sandbox_seconds": "sandbox_s",
    "slot_seconds": "slot_s",
    "admitted_seconds": "admitted_s",
}
_COUNTS = [name for name in UsageStatus.model_fields if name not in _SECONDS and name != "wasted_tokens"]


def usage_status(amounts: UsageAmounts) -> dict[str, Any]:
    """Return the `usage` of a status, without zeros, NaN and infinity: JSON cannot represent the latter two."""
    counts = {name: getattr(amounts, name) or None for name in (*_COUNTS, "wasted_tokens")}
    measured = {name: getattr(amounts, field) for name, field in _SECONDS.items()}
    seconds = {name: (round(value, 1) or None) if math.isfinite(value) else None for name, value in measured.items()}
    return UsageStatus(**counts, **seconds).model_dump(by_alias=True, exclude_none=True)


def usage_amounts(status: UsageStatus | None) -> UsageAmounts:
    """Return the amounts of a status; zeros for None."""
    if status is None:
        return UsageAmounts()
    counts = {name: getattr(status, name) or 0 for name in _COUNTS}
    return UsageAmounts(**counts, **{field: getattr(status, name) or 0.0 for name, field in _SECONDS.items()})


HOUR_S = 3600.0
HOURLY_KEPT = timedelta(days=8)
"""Age up to which every hour's mark is kept; of older days, the first mark is."""
DAILY_KEPT = timedelta(days=400)
_KEY = "%Y-%m-%dT%HZ"


@dataclass(frozen=True, slots=True)
class UsageMark:
    """Total usage at one time. at: unix seconds."""

    at: float
    amounts: UsageAmounts


def with_mark(data: Mapping[str, str], total: UsageAmounts, now: float) -> dict[str, str]:
    """Return the data with a mark for the current hour, which stays if there is one, and without marks that are too old."""
    time = datetime.fromtimestamp(now, UTC)
    mark = {"at": now, "usage": usage_status(total)}
    marked = {time.strftime(_KEY): json.dumps(mark, separators=(",", ":")), **data}
    kept: dict[str, str] = {}
    days: set[str] = set()
    for key in sorted(marked):
        age = time - _time_of(key, time)
        if age <= HOURLY_KEPT or (age <= DAILY_KEPT and key[:10] not in days):
            kept[key] = marked[key]
        days.add(key[:10])
    return kept


def next_mark_s(now: float) -> float:
    """Return the seconds until the next mark is due."""
    return HOUR_S - now % HOUR_S


def marks_of(data: Mapping[str, str]) -> list[UsageMark]:
    """Return the marks by time. Raises InvalidInput if one cannot be read."""
    return sorted((_mark(key, text) for key, text in data.items()), key=lambda mark: mark.at)


def mark_before(marks: Iterable[UsageMark], time: float) -> UsageMark | None:
    """Return the last mark at or before a time; None if all are later."""
    return max((mark for mark in marks if mark.at <= time), key=lambda mark: mark.at, default=None)


def used_between(first: UsageAmounts, last: UsageAmounts) -> UsageAmounts:
    """Return the difference of two totals; `stored_bytes` is the last one's.

    Tokens that were open at the first and have a use at the last one count negatively as `open_tokens`, so the parts
    add up to `generated_tokens`.
    """
    before, after = first.model_dump(), last.model_dump()
    found = {name: after[name] - number for name, number in before.items()}
    return UsageAmounts(**{**found, "stored_bytes": last.stored_bytes})


def _time_of(key: str, otherwise: datetime) -> datetime:
    """Return a key's hour; for a key that is not ours, `otherwise`: it is kept."""
    try:
        return datetime.fromisoformat(f"{key.removesuffix('Z')}:00+00:00")
    except ValueError:
        return otherwise


def _mark(key: str, text: str) -> UsageMark:
    try:
        content = json.loads(text)
        return UsageMark(float(content["at"]), usage_amounts(UsageStatus.model_validate(content["usage"])))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise InvalidInput(f"the usage mark '{key}' cannot be read: {error}") from error

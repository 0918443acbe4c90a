"""Conversion between usage amounts and the `usage` of a status. Pure."""

from typing import Any

from marlaas_api.kinds.status import UsageStatus
from marlaas_api.messages import UsageAmounts

_SECONDS = {
    "engine_seconds": "engine_s",
    "trainer_seconds": "trainer_s",
    "sandbox_seconds": "sandbox_s",
    "admitted_seconds": "admitted_s",
}
_COUNTS = [name for name in UsageStatus.model_fields if name not in _SECONDS and name != "wasted_tokens"]


def usage_status(amounts: UsageAmounts) -> dict[str, Any]:
    """Return the `usage` of a status, without zeros."""
    counts = {name: getattr(amounts, name) or None for name in (*_COUNTS, "wasted_tokens")}
    seconds = {name: round(getattr(amounts, field), 1) or None for name, field in _SECONDS.items()}
    return UsageStatus(**counts, **seconds).model_dump(by_alias=True, exclude_none=True)


def usage_amounts(status: UsageStatus | None) -> UsageAmounts:
    """Return the amounts of a status; zeros for None."""
    if status is None:
        return UsageAmounts()
    counts = {name: getattr(status, name) or 0 for name in _COUNTS}
    return UsageAmounts(**counts, **{field: getattr(status, name) or 0.0 for name, field in _SECONDS.items()})

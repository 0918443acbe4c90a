"""Usage of Tenants within a period, from the history that the operator keeps of their totals (`marlaas_api.usage_objects`)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from marlaas.cluster.errors import ObjectMissing
from marlaas.cluster.kubectl import ClusterTarget, Kubectl
from marlaas.cluster.usage import TENANTS
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.status import TenantStatus, unix_seconds
from marlaas_api.messages import UsageAmounts
from marlaas_api.usage_objects import HOUR_S, UsageMark, mark_before, marks_of, usage_amounts, used_between

_AGE = re.compile(r"([0-9]+)([mhdw])")
_UNITS_S = {"m": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "w": 7 * 24 * HOUR_S}


@dataclass(frozen=True, slots=True)
class Period:
    """A time from `since` to `until`, in unix seconds."""

    since: float
    until: float


@dataclass(frozen=True, slots=True)
class TenantPeriod:
    """A tenant's usage in the period between the two marks that are next to the wanted one."""

    tenant: str
    counted: Period
    amounts: UsageAmounts

    def as_dict(self) -> dict[str, str | int | float]:
        """Return one flat object for CSV and JSON; `since` and `until` are the counted times."""
        times = {"since": iso(self.counted.since), "until": iso(self.counted.until)}
        return {"tenant": self.tenant, **times, **self.amounts.as_dict()}


def period(since: str, until: str | None, now: float) -> Period:
    """Parse the two times. Raises InvalidInput if one has another form, or the period does not lie in the past."""
    end = time_of(until, now) if until is not None else now
    start = time_of(since, now)
    if start >= end:
        raise InvalidInput(f"the period begins at {iso(start)}, which is not before its end, {iso(end)}")
    if end > now:
        raise InvalidInput(f"the period ends at {iso(end)}, which has not come yet")
    return Period(start, end)


def time_of(text: str, now: float) -> float:
    """Parse an age (`36h`, `7d`), a date or a date with time to unix seconds; without a zone it is UTC. Raises InvalidInput."""
    if age := _AGE.fullmatch(text):
        return now - int(age[1]) * _UNITS_S[age[2]]
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"'{text}' is no time: use a date (2026-11-01), a date with time (2026-11-01T08:00Z) or an age (90m, 36h, 7d, 4w)"
        ) from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def iso(time: float) -> str:
    """Return a time as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def period_rows(kubectl: Kubectl, wanted: Period, now: float) -> Iterator[TenantPeriod | str]:
    """Yield each Tenant's usage in the period, and notes about what could not be counted.

    It is counted between two marks: the last ones before the period's begin and end. At `now`, the status is a mark.

    Raises the errors of `marlaas.cluster.errors`, and InvalidInput for a mark that cannot be read.
    """
    for body in kubectl.list(TENANTS):
        name, status = body["metadata"]["name"], TenantStatus.model_validate(body.get("status") or {})
        if status.usage_history is None:
            yield f"Tenant {name} has no usage history yet: the operator begins it once it has read the bus"
            continue
        marks = [*_history(kubectl, status.usage_history), UsageMark(now, usage_amounts(status.usage))]
        begins = mark_before(marks, wanted.since)
        if begins is None:
            begins = marks[0]
            if (unix_seconds(body["metadata"].get("creationTimestamp")) or 0.0) < wanted.since:
                yield f"Tenant {name} is counted from {iso(begins.at)}: its history begins then"
        ends = mark_before(marks, wanted.until) or begins
        counted = Period(begins.at, ends.at)
        yield TenantPeriod(name, counted, used_between(begins.amounts, ends.amounts))


def _history(kubectl: Kubectl, place: str) -> list[UsageMark]:
    namespace, _, name = place.partition("/")
    target = ClusterTarget(kubectl.target.context, namespace, kubectl.target.kubeconfig)
    try:
        body = Kubectl(target, kubectl.program).get("configmaps", name)
    except ObjectMissing:
        return []
    return marks_of(body.get("data") or {})

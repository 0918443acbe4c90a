"""Tenants' quotas: which job a quota refuses, what it waits for, and when a tenant's jobs pause. Pure.

Jobs, adapter slots and storage are limits on admission. Tokens a second and trainer seconds an hour are rates: while a
tenant is over one, the orchestrator issues no tasks for its jobs. No job fails because of a quota.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api.messages import JobDocument, Progress, TenantQuota
from marlaas_api.numeric import quantity

REFRESH_S = 10.0
"""Seconds for which the text of `QuotaMessages` about a tenant's running job is reused, although the finished steps in it have changed."""
NUM_DETAILED = 8
"""Number of waiting jobs of a tenant whose messages name a running job and its finished steps. Other messages contain only the refusal."""
TOKEN_WINDOW_S = 60.0
TRAINER_WINDOW_S = 600.0
"""Seconds over which the use of tokens and of trainers is averaged."""
_HOUR_S = 3600.0
_ROUGH_MINUTES = (1, 2, 5, 10, 20, 30, 120, 360, 1440)
_GIB = 2**30


@dataclass(slots=True)
class TenantLoad:
    """A tenant's use of those limits of its quota that are checked at admission: jobs, adapter slots, stored bytes.

    Attributes:
        jobs: by uid of each admitted job, the number of its agents that need adapter slots.
        stored_bytes: bytes that all jobs of the tenant, admitted or not, keep in the blob store.
    """

    jobs: dict[str, int] = field(default_factory=dict)
    stored_bytes: int = 0

    @property
    def slots(self) -> int:
        """Adapter slots of the admitted jobs, one for each agent."""
        return sum(self.jobs.values())


class Quotas:
    """The tenants' quotas and loads in one round of admissions.

    Args:
        quotas: by tenant; a tenant that is absent has no limit.
        holding: admitted jobs.
        stored: by tenant, the bytes that its jobs keep in the blob store.
    """

    def __init__(
        self, quotas: Mapping[str, TenantQuota], holding: Iterable[JobDocument], stored: Mapping[str, int]
    ) -> None:
        self._quotas = quotas
        self._loads = {tenant: TenantLoad(stored_bytes=stored.get(tenant, 0)) for tenant in quotas}
        for document in holding:
            self.add(document)

    def add(self, document: JobDocument) -> None:
        """Add an admitted job to its tenant's load, if the tenant has a quota."""
        if document.tenant in self._loads:
            self._loads[document.tenant].jobs[document.uid] = document.spec.num_pinned

    def running(self, tenant: str) -> frozenset[str]:
        """Return the uids of a tenant's admitted jobs; none if the tenant has no quota."""
        load = self._loads.get(tenant)
        return frozenset(load.jobs) if load is not None else frozenset()

    def refusal(self, document: JobDocument) -> str:
        """Return why its tenant's quota refuses a job's admission, such as `over quota: 3 of 3 jobs`; empty if the quota admits it."""
        quota, load = self._quotas.get(document.tenant), self._loads.get(document.tenant)
        if quota is None or load is None:
            return ""
        need = document.spec.num_pinned
        if quota.jobs is not None and len(load.jobs) >= quota.jobs:
            return f"over quota: {len(load.jobs)} of {quota.jobs} jobs"
        if quota.adapter_slots is not None and load.slots + need > quota.adapter_slots:
            return f"over quota: {load.slots} of {quota.adapter_slots} adapter slots, and it needs {need}"
        if quota.storage is not None and load.stored_bytes >= quantity(quota.storage):
            kept = f"{load.stored_bytes / _GIB:.1f} of {quantity(quota.storage) / _GIB:.1f} GiB stored"
            return f"over quota: {kept}; delete jobs with adapterRetention: delete, or have the quota raised"
        return ""


@dataclass(frozen=True, slots=True)
class _Waited:
    running: frozenset[str]
    at: float
    text: str


class QuotaMessages:
    """Builds the messages of jobs that a quota keeps waiting: the refusal, then the tenant's running job with the fewest steps left.

    The message names the running job's finished steps. These change all the time, and thousands of jobs may wait. So the text about the running
    job is kept for REFRESH_S seconds while the same jobs run, and only the first NUM_DETAILED jobs of a tenant's queue have it in their message.
    """

    def __init__(self) -> None:
        self._waited: dict[str, _Waited] = {}
        self._detailed: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin a round: the next `NUM_DETAILED` jobs of each tenant are the first of its queue."""
        self._detailed.clear()

    def message(self, document: JobDocument, refusal: str, running: Mapping[str, Progress | None], now: float) -> str:
        """Return the message of a waiting job, as text for people.

        Args:
            document: of the waiting job.
            refusal: as `Quotas.refusal` returned.
            running: progress of the tenant's admitted jobs by uid; None for a job that has none yet.
            now: unix seconds.
        """
        tenant = document.tenant
        self._detailed[tenant] += 1
        if self._detailed[tenant] > NUM_DETAILED or not running:
            return refusal
        known, uids = self._waited.get(tenant), frozenset(running)
        # A job has no progress for a moment after its admission; nothing is kept then.
        if known is None or not known.text or known.running != uids or not 0 <= now - known.at < REFRESH_S:
            known = self._waited[tenant] = _Waited(uids, now, _nearest(running.values()))
        return f"{refusal}; {known.text}" if known.text else refusal


def _nearest(running: Iterable[Progress | None]) -> str:
    known = [progress for progress in running if progress is not None]
    if not known:
        return ""
    first = min(known, key=lambda one: (one.steps - one.step, one.namespace, one.job))
    return f"waits for {first.namespace}/{first.job}, {first.step} of {first.steps} steps"


@dataclass(slots=True)
class RateLimit:
    """A leaky bucket for one rate of a tenant. One window's allowance may be used at once.

    The unit of use is tokens or seconds.

    Attributes:
        level: as of `at`, the use that exceeds what the rate has allowed. Use adds to it, and `rate` is subtracted each second, down to 0.
        at: time of the last call of `use`, seconds; None before the first.
        rate: allowed use per second, as of that call.
    """

    level: float = 0.0
    at: float | None = None
    rate: float = 0.0

    def use(self, amount: float, rate: float, now: float) -> None:
        """Add `amount`, the use since the last call. It is negative if use is taken back.

        rate: allowed use per second. now: seconds of the same clock at every call.
        """
        elapsed = max(0.0, now - self.at) if self.at is not None else 0.0
        left = max(0.0, self.level - rate * elapsed)
        self.level, self.at, self.rate = max(0.0, left + amount), now, rate

    def is_empty(self, now: float) -> bool:
        """Return whether the level has fallen to 0 by now, if nothing was used since the last call of `use`."""
        return self.at is None or self.level <= self.rate * (now - self.at)

    def left_s(self, rate: float, window_s: float) -> float:
        """Return the seconds until the use averaged over the window falls to the rate, if nothing more is used; infinite for rate 0."""
        return max(0.0, self.level / rate - window_s) if rate > 0 else math.inf

    def is_over(self, rate: float, window_s: float) -> bool:
        """Return whether the use averaged over the window exceeds the rate."""
        return self.level > rate * window_s


class Pacing:
    """Decides which tenants are over one of their rates, tokens a second and trainer seconds an hour, so that their jobs pause.

    Each rate has a leaky bucket (`RateLimit`). The levels are in memory only; a restart of the orchestrator sets them to 0.

    A tenant whose jobs are all deleted keeps its levels until they are empty, so that it gains nothing by short jobs.
    """

    def __init__(self) -> None:
        self._limits: dict[tuple[str, str], RateLimit] = {}
        self._reasons: dict[str, str] = {}

    def reason(self, tenant: str) -> str:
        """Return why the tenant's jobs pause; empty if they do not."""
        return self._reasons.get(tenant, "")

    def update(
        self,
        quotas: Mapping[str, TenantQuota],
        gained: Mapping[str, tuple[float, float]],
        now: float,
    ) -> None:
        """Add the use since the last call, and decide which tenants pause.

        Args:
            quotas: by tenant; a tenant that is absent never pauses.
            gained: by tenant, charged tokens and trainer seconds since the last call.
            now: unix seconds.
        """
        self._reasons = {}
        for tenant, quota in quotas.items():
            for position, (name, rate, window_s, words) in enumerate(_rates(quota)):
                if rate is None:
                    continue
                limit = self._limits.setdefault((tenant, name), RateLimit())
                limit.use(gained.get(tenant, (0.0, 0.0))[position], rate, now)
                if limit.is_over(rate, window_s):
                    about = _about(limit.left_s(rate, window_s))
                    self._reasons.setdefault(
                        tenant,
                        f"over quota of tenant {tenant}: {words}; it begins no new tasks until the average is lower{about}",
                    )
        self._limits = {key: limit for key, limit in self._limits.items() if not limit.is_empty(now)}


def _about(left_s: float) -> str:
    """Return `left_s`, in seconds, as rough text for a message, such as `, in about 5 minutes`.

    An exact time would change often, and each change is written to the progress of all the tenant's jobs.
    """
    minutes = next((minutes for minutes in _ROUGH_MINUTES if left_s <= 60 * minutes), None)
    if minutes is None:
        return f", in more than {_ROUGH_MINUTES[-1] // 60} hours"
    return (
        f", in about {minutes} minute{'s' if minutes > 1 else ''}"
        if minutes < 60
        else f", in about {minutes // 60} hours"
    )


def _rates(quota: TenantQuota) -> list[tuple[str, float | None, float, str]]:
    """Return each rate as (name, allowed use per second, window in seconds, text); None as allowed use: no limit.

    The first is that of tokens, the second that of trainer seconds, in the order of the values of `gained` (`Pacing.update`).
    """
    tokens, seconds = quota.tokens_per_second, quota.trainer_seconds_per_hour
    per_second = None if seconds is None else seconds / _HOUR_S
    return [
        ("tokens", tokens, TOKEN_WINDOW_S, f"more than {tokens or 0:g} tokens a second on average"),
        ("trainer", per_second, TRAINER_WINDOW_S, f"more than {seconds or 0:g} trainer seconds an hour on average"),
    ]

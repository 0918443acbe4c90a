"""Many jobs on one screen: grouped by tenant, with each tenant's share beside the share that its weight entitles it to. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas.local.table import JobView, token_cells
from marlaas_api.messages import JobDocument, Phase, UsageAmounts
from marlaas_api.messages.usage import total

GROUPED_FROM = 9
"""Number of jobs from which displays and reports are grouped by tenant."""
_BAR_CELLS = 10
_ORDER = (Phase.FAILED, Phase.RUNNING, Phase.QUEUED, Phase.SUSPENDED, Phase.SUCCEEDED)


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant's jobs in display order, and its shares of the engines' tokens.

    entitled: share by weight among the tenants with running jobs; None if it has none, or if weights are not known.
    received: share of the current tokens per second; 0 if no tokens are generated.
    """

    name: str
    weight: float
    jobs: tuple[JobView, ...]
    entitled: float | None = None
    received: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of its jobs."""
        return sum(one.progress.tokens_per_s for one in self.jobs if one.progress is not None)

    @property
    def step(self) -> int:
        """Finished steps of its jobs."""
        return sum(one.progress.step for one in self.jobs if one.progress is not None)

    @property
    def steps(self) -> int:
        """Steps of its jobs in all."""
        return sum(one.document.spec.training.steps for one in self.jobs)

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engines generated for its jobs: those of `amounts`, in a fraction of the time."""
        return sum(one.progress.generated_tokens for one in self.jobs if one.progress is not None)

    @property
    def amounts(self) -> UsageAmounts:
        """Usage of its jobs."""
        return total(one.progress.amounts for one in self.jobs if one.progress is not None)

    def counts(self) -> str:
        """Return its jobs by phase as `3 running, 1 queued`."""
        return phases(_phase(one) for one in self.jobs)


@dataclass(frozen=True, slots=True)
class OmittedJobs:
    """Jobs of a tenant for which there is no room. counts: as `TenantView.counts`."""

    num: int
    counts: str


Row = TenantView | JobView | OmittedJobs


def by_tenant(views: Sequence[JobView]) -> tuple[TenantView, ...]:
    """Group jobs by tenant, tenants by name; failed jobs come first, finished ones last."""
    groups: dict[str, list[JobView]] = {}
    for view in views:
        groups.setdefault(view.document.tenant, []).append(view)
    plain = [
        TenantView(name, jobs[0].document.tenant_weight, tuple(sorted(jobs, key=_rank)))
        for name, jobs in sorted(groups.items())
    ]
    weights = sum(one.weight for one in plain if _runs(one))
    is_known = all(view.is_weight_known for view in views)
    tokens = sum(one.tokens_per_s for one in plain)
    return tuple(
        TenantView(
            one.name,
            one.weight,
            one.jobs,
            one.weight / weights if is_known and _runs(one) else None,
            one.tokens_per_s / tokens if tokens else 0.0,
        )
        for one in plain
    )


def rows(views: Sequence[JobView], room: int) -> tuple[Row, ...]:
    """Return the rows of a live table of at most about `room` rows.

    Few jobs are rows of their own. More are grouped; if there is no room for all, each tenant shows as many as fit
    and the number of the others. Every tenant shows at least one job.
    """
    if len(views) < GROUPED_FROM:
        return tuple(views)
    tenants = by_tenant(views)
    each = max(1, room // len(tenants) - 2)
    found: list[Row] = []
    for tenant in tenants:
        found.append(tenant)
        shown = len(tenant.jobs) if len(views) + len(tenants) <= room else each
        found += tenant.jobs[:shown]
        if rest := tenant.jobs[shown:]:
            found.append(OmittedJobs(len(rest), phases(_phase(one) for one in rest)))
    return tuple(found)


def bar(tenant: TenantView, cells: int = _BAR_CELLS) -> str:
    """Return a bar of the received share, with a mark at the entitled share: `█████····|··········`."""
    filled = round(tenant.received * cells)
    drawn = ["█" if at < filled else "·" for at in range(cells)]
    if tenant.entitled is not None:
        drawn[min(cells - 1, round(tenant.entitled * cells))] = "|"
    return "".join(drawn)


def share(tenant: TenantView) -> str:
    """Return the bar and both shares: `█████···|··· 25% (50%)`; empty if it neither receives nor is entitled to any."""
    if tenant.entitled is None:
        return f"{bar(tenant)} {tenant.received:.0%}" if tenant.received else ""
    return f"{bar(tenant)} {tenant.received:.0%} ({tenant.entitled:.0%})"


def plain_tenant(tenant: TenantView) -> str:
    """Return one line for logs and outputs that are not terminals."""
    shares = "" if tenant.entitled is None else f", {tenant.received:.0%} of all ({tenant.entitled:.0%} by weight)"
    tokens, trained, wasted = token_cells(tenant.amounts)
    return (
        f"{tenant.name}: {tenant.counts()}; steps {tenant.step}/{tenant.steps}, {tenant.tokens_per_s:,.0f} tok/s{shares}; "
        f"tokens {tokens}, trained {trained}, wasted {wasted}"
    )


@dataclass(frozen=True, slots=True)
class SharesSoFar:
    """A tenant's tokens since the first observation, and those that it was entitled to. of: the tokens of all tenants."""

    received: float = 0.0
    entitled: float = 0.0
    of: float = 0.0

    def plus(self, received: float, entitled: float, of: float) -> "SharesSoFar":
        """Return the sums."""
        return SharesSoFar(self.received + received, self.entitled + entitled, self.of + of)


@dataclass(slots=True)
class ShareMeter:
    """Adds up the shares of tenants from one observation of a run to the next.

    Tokens between two observations count by the shares of the first one: a job that has ended in between was entitled.
    """

    sums: dict[str, SharesSoFar] = field(default_factory=dict)
    _last: Sequence[TenantView] = ()

    def see(self, views: Sequence[JobView]) -> None:
        """Add what was generated since the last observation."""
        before = {one.name: one for one in self._last}
        self._last = by_tenant(views)
        gained = {
            one.name: max(0, one.generated_tokens - before[one.name].generated_tokens)
            for one in self._last
            if one.name in before
        }
        whole = sum(gained.values())
        for name, tokens in gained.items():
            entitled = before[name].entitled or 0.0
            self.sums[name] = self.sums.get(name, SharesSoFar()).plus(tokens, entitled * whole, whole)


def phases(found: Iterable[Phase | None]) -> str:
    """Return phases as `3 running, 1 queued`. None: the job has no progress yet."""
    counts: Mapping[Phase | None, int] = Counter(found)
    named = [f"{counts[phase]} {phase.value.lower()}" for phase in _ORDER if counts.get(phase)]
    starting = [f"{counts[None]} starting"] if counts.get(None) else []
    return ", ".join([*named, *starting])


def tenants_of(documents: Iterable[JobDocument]) -> list[str]:
    """Return the names of the jobs' tenants, sorted."""
    return sorted({document.tenant for document in documents})


def _phase(view: JobView) -> Phase | None:
    return view.progress.phase if view.progress is not None else None


def _runs(tenant: TenantView) -> bool:
    return any(_phase(one) is Phase.RUNNING for one in tenant.jobs)


def _rank(view: JobView) -> tuple[int, int, str]:
    phase = _phase(view)
    return (
        _ORDER.index(phase) if phase is not None else len(_ORDER),
        -(view.progress.step if view.progress else 0),
        view.name,
    )

"""Snapshots of one object and its related objects: the input of the policies. Frozen; no clock, no client.

`status` and owned objects are raw, because they are only compared. Everything else is parsed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from marlaas_api.kinds import ModelPool, RLJob, Tenant
from marlaas_api.kinds.status import unix_seconds
from marlaas_api.messages import ExportReport, JobDocument, JobHold, Phase, Progress, TenantUsage
from marlaas_api.reasons import Reason
from marlaas_operator.pod_facts import PodFacts

T = TypeVar("T")

OwnedKey = tuple[str, str]
"""(kind, name) of an owned object; its owner determines its namespace."""

Owned = Mapping[OwnedKey, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata that policies need. Times are unix seconds; namespace is empty for cluster-scoped kinds."""

    name: str
    uid: str
    namespace: str = ""
    generation: int = 1
    created_at: float = 0.0
    deleted_at: float | None = None
    finalizers: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Meta":
        """Parse the metadata of a body."""
        meta = body["metadata"]
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            namespace=meta.get("namespace") or "",
            generation=int(meta.get("generation") or 1),
            created_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
            deleted_at=unix_seconds(meta.get("deletionTimestamp")),
            finalizers=tuple(meta.get("finalizers") or ()),
        )


@dataclass(frozen=True, slots=True)
class BusState:
    """State of the operator's connection to the bus.

    Attributes:
        available: the bus answers now. The cache stays usable while it does not.
        since: when `available` last changed, unix seconds.
        synced: the bus was read whole since the operator started; before that, a missing entry is unknown, not
            absent.
        leaderless_since: since when no orchestrator holds the leader lease, unix seconds; None: one holds it,
            or unknown. The lease is the key `orchestrator.all.leader` of the bucket `replicas`; it expires 10 s
            after its last renewal.
    """

    available: bool
    since: float
    synced: bool = True
    leaderless_since: float | None = None


@dataclass(frozen=True, slots=True)
class JobPool:
    """A pool that a job names.

    Attributes:
        pool: None if absent or invalid; problem: why it does not parse.
        deleting: it is being deleted.
        pods: its rollout and trainer workers.
    """

    name: str
    pool: ModelPool | None = None
    problem: str = ""
    deleting: bool = False
    pods: tuple[PodFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """One RLJob and everything that its plan depends on.

    Attributes:
        job: None if the stored object does not parse; `problem` is then the reason.
        status: as stored, None if never written.
        pools: the pools that the job names: its own, which bounds its sandboxes, then those of its agents.
        tenant: the Tenant that has the job's namespace; None: the default tenant.
        unread_tenant: name of the namespace's Tenant if it does not parse, so that its weight and quota are unknown;
            else empty.
        tenant_missing: no Tenant has the namespace, and the installation requires one.
        queue_full: why the job may not enter its tenant's queue yet (`quota.queuedJobs`); empty if it may.
        document, progress: entries on the bus under the job's key, whatever their uid.
        unreadable: why the document or the progress cannot be decoded (a newer release's), else empty. Both are then the last
            that could be, or None: unknown, not absent.
        owned: ServiceAccount, NetworkPolicy and Deployment, where they exist (Secrets are never read).
        pods: of its sandbox; exporter_pods: of its exporter.
        report: of its exporter, whose pod is the tenant's: bound and escape what it says.
        exporter_credential: bus credential of its exporter; None unless the job asks for one, or if the bus has no users.
        exporter_refusal: why an object of the exporter was refused last; else empty.
        credential: bus credential of its sandbox for the present time window; None unless the job is admitted,
            or if the bus has no users.
        first_seen_at: when this operator process first saw the object, unix seconds of our own clock.
        deletion_seen_at: when it first saw the deletion, likewise; 0.0 if it is not being deleted.
        refusal: message of an error of API server or bus that is permanent (quota, admission, a document that
            is too large) or has lasted; else empty.
        is_refused: the API server refuses an action for good; a retry would be refused again.
        refusal_reason: BusUnavailable for errors of the bus, else PodRefused.
        closed_egress: ranges of its egress of which the installation opens nothing to jobs.
    """

    meta: Meta
    bus: BusState
    job: RLJob | None
    problem: str = ""
    status: Mapping[str, Any] | None = None
    pools: tuple[JobPool, ...] = ()
    tenant: Tenant | None = None
    unread_tenant: str = ""
    tenant_missing: bool = False
    queue_full: str = ""
    document: JobDocument | None = None
    progress: Progress | None = None
    unreadable: str = ""
    owned: Owned = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    credential: str | None = None
    exporter_pods: tuple[PodFacts, ...] = ()
    exporter_credential: str | None = None
    exporter_refusal: str = ""
    report: ExportReport | None = None
    first_seen_at: float = 0.0
    deletion_seen_at: float = 0.0
    refusal: str = ""
    refusal_reason: Reason = Reason.POD_REFUSED
    closed_egress: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def own_pool(self) -> ModelPool | None:
        """The pool of the job's own poolRef; None if absent or invalid."""
        return self.pools[0].pool if self.pools else None

    @property
    def serving_pools(self) -> tuple[JobPool, ...]:
        """The pools on which the job's agents run, by its document; all that it names if there is none."""
        document = self.document
        return tuple(one for one in self.pools if document is None or one.name in document.pools)

    @property
    def own_document(self) -> JobDocument | None:
        """The document with this object's uid; None if it belongs to an earlier job of the same name."""
        return self.document if self.document is not None and self.document.uid == self.meta.uid else None

    @property
    def num_sandboxes(self) -> int | None:
        """Number of sandboxes in the job's spec; if the object does not parse, in its published document."""
        if self.job is not None:
            return self.job.spec.environment.replicas
        return self.own_document.spec.environment.replicas if self.own_document is not None else None

    @property
    def hold(self) -> JobHold | None:
        """The active hold in the job's document: its pods are refused, and it is not admitted."""
        own = self.own_document
        return own.hold if own is not None and own.is_held else None

    @property
    def own_progress(self) -> Progress | None:
        """The progress with this object's uid."""
        return self.progress if self.progress is not None and self.progress.uid == self.meta.uid else None

    @property
    def own_report(self) -> ExportReport | None:
        """The exporter's report with this object's uid."""
        return self.report if self.report is not None and self.report.uid == self.meta.uid else None

    @property
    def progress_known(self) -> bool:
        """Whether a missing progress is really absent, not unread."""
        return self.bus.synced and not self.unreadable

    @property
    def sandbox_wanted(self) -> bool | None:
        """Whether the job should have a sandbox; None if its progress is unknown."""
        progress = self.own_progress
        if progress is None:
            return False if self.progress_known else None
        return progress.admitted and not progress.phase.final


@dataclass(frozen=True, slots=True)
class JobLoad:
    """Usage of one job, as its pools and its tenant count it.

    Attributes:
        slots: by pool, adapter slots that it holds while it is admitted, one for each agent.
        published: its document is on the bus.
    """

    namespace: str
    name: str
    phase: Phase
    admitted: bool
    slots: Mapping[str, int]
    published: bool
    tokens_per_s: float = 0.0
    stored_bytes: int = 0

    @classmethod
    def of(
        cls,
        body: Mapping[str, Any],
        slots: Mapping[str, int] | None,
        document: JobDocument | None,
        progress: Progress | None,
    ) -> "JobLoad":
        """Return the load of a job.

        Args:
            slots: None for a job that does not parse: its published document counts, for the job may be running.
            document, progress: bus entries of the job's uid, None where absent.
        """
        if slots is None:
            slots = {pool: document.num_pinned_on(pool) for pool in document.pools} if document is not None else {}
        return cls(
            namespace=body["metadata"]["namespace"],
            name=body["metadata"]["name"],
            phase=progress.phase if progress is not None else _phase_of((body.get("status") or {}).get("phase")),
            admitted=progress is not None and progress.admitted and not progress.phase.final,
            slots=slots,
            published=document is not None,
            tokens_per_s=progress.tokens_per_s if progress is not None else 0.0,
            stored_bytes=progress.stored_bytes if progress is not None else 0,
        )

    @property
    def competes(self) -> bool:
        """Whether the job is admitted or waits, so that its tenant competes for the pools."""
        return self.admitted or self.phase is Phase.QUEUED

    @property
    def is_queued(self) -> bool:
        """Whether the job is on the bus, and neither admitted nor ended: queued, or suspended."""
        return self.published and not self.admitted and not self.phase.final


def slots_of(job: RLJob) -> Mapping[str, int]:
    """Return the adapter slots that a job holds while it is admitted, by pool."""
    return Counter(map(job.spec.pool_of, job.spec.pinned))


def _phase_of(stored: str | None) -> Phase:
    """Return the stored phase, Queued if there is none."""
    return Phase(stored) if stored is not None else Phase.QUEUED


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """One ModelPool and everything that its plan depends on.

    Attributes:
        jobs: all that name the pool.
        owned: its ConfigMap, ServiceAccount, StatefulSets, Services, PodDisruptionBudgets and NetworkPolicies
            in the release's namespace, where they exist.
        pods: its rollout and trainer workers.
        credentials: bus credentials of its workers by role (rollout, trainer), for the present time window;
            empty if the bus has no users.
        refusal: as in JobSnapshot.
    """

    meta: Meta
    bus: BusState
    pool: ModelPool | None
    problem: str = ""
    status: Mapping[str, Any] | None = None
    jobs: tuple[JobLoad, ...] = ()
    owned: Owned = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    credentials: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """One Tenant.

    Attributes:
        lost: namespaces in its spec that belong to an older Tenant, with that one's name.
        jobs: of the namespaces that belong to it.
        weights: of all tenants that have jobs, by name.
        places: by pool, the number of agents that it admits.
        usage: on the bus; None if absent, or not read yet.
        owned: its ConfigMap in the release's namespace, if it exists.
    """

    meta: Meta
    bus: BusState
    tenant: Tenant | None
    problem: str = ""
    status: Mapping[str, Any] | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    jobs: tuple[JobLoad, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    usage: TenantUsage | None = None
    owned: Owned = field(default_factory=dict)


def by_precedence(tenants: Iterable[tuple[Meta, T]]) -> tuple[T, ...]:
    """Return the tenants by precedence for a namespace that several of them list: the oldest first."""
    return tuple(tenant for _, tenant in sorted(tenants, key=lambda pair: (pair[0].created_at, pair[0].name)))

"""What was observed of one object and of what belongs to it: the values that policies decide from. Frozen; no clock, no client.

`status` and owned objects stay as the API server gave them: they are compared, not understood. Everything else is parsed at the edge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.kinds import ModelPool, RLJob, RLJobSpec, Tenant
from marlaas_api.kinds.checks import slots_needed
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.pod_facts import PodFacts, unix_seconds

OwnedKey = tuple[str, str]
"""(kind, name) of an owned object; its namespace follows from its owner."""

Owned = Mapping[OwnedKey, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Meta:
    """The part of an object's metadata that decisions need. Times are unix seconds; namespace is empty for cluster-scoped kinds."""

    name: str
    uid: str
    namespace: str = ""
    generation: int = 1
    created_at: float = 0.0
    deleted_at: float | None = None
    finalizers: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Meta":
        """Metadata of an object's body."""
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
    """synced: the mirror of the bus has been read whole since the operator started; before that, what it lacks is unknown, not absent.
    available: the bus answers now; since: when that last changed, unix seconds. A mirror stays usable while the bus is away.
    leaderless_since: since when no orchestrator holds the lease (key `orchestrator.all.leader` of the bucket `replicas`, which expires 10 s after its holder fell
    silent), unix seconds; None: one holds it, or that is not known."""

    available: bool
    since: float
    synced: bool = True
    leaderless_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """One RLJob.

    job: None if the stored object does not parse; `problem` then says why. status: as stored, None if never written. pool: the ModelPool that it names, if there
    is one that parses; pool_problem: why the one that there is does not. tenants: all that parse, in order of precedence
    (`policies.tenant.by_precedence`); tenant_unread: one that does not parse names the job's namespace, so whose it is is unknown. document, progress: what stands on the bus under the job's key, whatever its uid.
    progress_unread: something stands there that this version cannot read (a newer orchestrator's): then what it says is unknown, not absent.
    owned: its ServiceAccount, NetworkPolicy and Deployment where they exist (Secrets are never read). pods: of its sandbox; pool_pods: of its pool.
    credential: its sandbox's bus credential, minted for the present time window; None unless progress says admitted (or while keys are missing).
    first_seen_at, deletion_seen_at: when this operator process first saw the object, and that it is to go, unix seconds of our own clock. refusal: the sentence of API server or bus when it refused an
    action for good (quota, admission, a document that is too large), or has kept failing for a while, else empty; refusal_reason: which of them (BusUnavailable).
    """

    meta: Meta
    bus: BusState
    job: RLJob | None
    problem: str = ""
    status: Mapping[str, Any] | None = None
    pool: ModelPool | None = None
    pool_deleting: bool = False
    pool_problem: str = ""
    tenants: tuple[Tenant, ...] = ()
    tenant_unread: bool = False
    document: JobDocument | None = None
    progress: Progress | None = None
    progress_unread: bool = False
    owned: Owned = field(default_factory=dict)
    pods: tuple[PodFacts, ...] = ()
    pool_pods: tuple[PodFacts, ...] = ()
    credential: str | None = None
    first_seen_at: float = 0.0
    deletion_seen_at: float = 0.0
    refusal: str = ""
    refusal_reason: Reason = Reason.POD_REFUSED

    @property
    def own_document(self) -> JobDocument | None:
        """The document of this very object, not of an earlier one of the same name."""
        return self.document if self.document is not None and self.document.uid == self.meta.uid else None

    @property
    def job_spec(self) -> RLJobSpec | None:
        """The job's spec; if the object does not parse, the spec of the document that was handed over."""
        if self.job is not None:
            return self.job.spec
        return self.own_document.spec if self.own_document is not None else None

    @property
    def own_progress(self) -> Progress | None:
        """The progress of this very object."""
        return self.progress if self.progress is not None and self.progress.uid == self.meta.uid else None

    @property
    def progress_known(self) -> bool:
        """Whether progress that is absent is absent indeed."""
        return self.bus.synced and not self.progress_unread


@dataclass(frozen=True, slots=True)
class JobLoad:
    """What one job means to its pool and its tenant. slots: adapter slots that it needs; begun: it has a document on the bus."""

    namespace: str
    name: str
    pool: str
    phase: Phase
    admitted: bool
    slots: int
    begun: bool
    tokens_per_s: float = 0.0

    @classmethod
    def of(cls, job: RLJob, document: JobDocument | None, progress: Progress | None) -> "JobLoad":
        """Load of a job, from what stands on the bus under its uid (None where nothing does)."""
        return cls(
            namespace=job.metadata.namespace,
            name=job.metadata.name,
            pool=job.spec.pool_ref.name,
            phase=progress.phase if progress is not None else _phase_of(job.status.phase if job.status else None),
            admitted=progress is not None and progress.admitted and not progress.phase.final,
            slots=slots_needed(job.spec),
            begun=document is not None,
            tokens_per_s=progress.tokens_per_s if progress is not None else 0.0,
        )

    @classmethod
    def of_unread(
        cls, body: Mapping[str, Any], pool: str, document: JobDocument | None, progress: Progress | None
    ) -> "JobLoad":
        """Load of a job that does not parse: what was handed over of it, which may be running."""
        return cls(
            namespace=body["metadata"]["namespace"],
            name=body["metadata"]["name"],
            pool=pool,
            phase=progress.phase if progress is not None else _phase_of((body.get("status") or {}).get("phase")),
            admitted=progress is not None and progress.admitted and not progress.phase.final,
            slots=slots_needed(document.spec) if document is not None else 0,
            begun=document is not None,
            tokens_per_s=progress.tokens_per_s if progress is not None else 0.0,
        )


def _phase_of(stored: str | None) -> Phase:
    """The last known phase."""
    return Phase(stored) if stored is not None else Phase.QUEUED


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """One ModelPool. jobs: all that name it. owned: its ConfigMap, ServiceAccount, StatefulSets, Services, PodDisruptionBudgets and
    NetworkPolicies in the release's namespace, where they exist. pods: its rollout and trainer workers. credentials: bus credentials of its workers by
    role (rollout, trainer), minted for the present time window; empty while keys are missing. refusal: as of a JobSnapshot."""

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
    """One Tenant. tenants: all, itself included, in order of precedence. jobs: all jobs of its namespaces."""

    meta: Meta
    bus: BusState
    tenant: Tenant | None
    problem: str = ""
    status: Mapping[str, Any] | None = None
    tenants: tuple[Tenant, ...] = ()
    jobs: tuple[JobLoad, ...] = ()

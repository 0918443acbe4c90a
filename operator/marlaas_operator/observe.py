"""Builds snapshots for the policies from the object cache and the bus view; makes no requests.

Parsed objects are memoized until their source changes.
"""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from pydantic import ValidationError

from marlaas_api import subjects
from marlaas_api.bus_users import CredentialIssuer
from marlaas_api.kinds import Kind, ModelPool, RLJob, Tenant
from marlaas_api.kinds.problems import problems_of
from marlaas_api.kinds.sizes import object_problem
from marlaas_api.reasons import Reason
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import (
    MODELPOOLS,
    PODS,
    RLJOBS,
    TENANTS,
    namespaces_of,
    pools_of,
    resource_of,
    target_of,
    unpacked,
)
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.job_loads import JobLoads
from marlaas_operator.object_cache import Group, ObjectCache
from marlaas_operator.pod_facts import EXPORTER, PodFacts, pod_facts
from marlaas_operator.snapshot import (
    JobPool,
    JobSnapshot,
    Meta,
    OwnedKey,
    PoolSnapshot,
    TenantSnapshot,
)
from marlaas_operator.tenancy import ListedTenant, Tenancy

B = TypeVar("B", bound=Kind)
T = TypeVar("T")
Problem = str
ActionError = tuple[Reason, str]
"""Reason and message of the error that keeps an object's actions from being executed."""
_UID_LABEL = "marlaas.dev/job-uid"


class Memo(Generic[T]):
    """Memoizes one value per object; recomputes it when the version of its source differs."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, T]] = {}

    def of(self, uid: str, version: object, make: Callable[[], T]) -> T:
        """Return the value for this uid; call `make` if there is none for this version."""
        kept = self._kept.get(uid)
        if kept is None or kept[0] != version:
            kept = self._kept[uid] = version, make()
        return kept[1]

    def forget(self, uid: str) -> None:
        """Drop the value of a deleted object."""
        self._kept.pop(uid, None)


class Observer:
    """Builds snapshots.

    Args:
        require_tenant: namespaces without a Tenant may run no jobs.
        now: unix seconds.

    Attributes:
        shares_changed: called when the tenants that have jobs, or their weights, changed.
        room_found: called with each job that was told to wait for room in its queue and has it now.
    """

    def __init__(  # noqa: PLR0913 (the last one is keyword-only)
        self,
        cache: ObjectCache,
        documents: JobDocuments,
        health: BusHealth,
        credentials: CredentialIssuer,
        now: Callable[[], float],
        *,
        require_tenant: bool = False,
    ) -> None:
        self.shares_changed: Callable[[], None] = lambda: None
        self.room_found: Callable[[Target], None] = lambda target: None
        self._require_tenant = require_tenant
        self._cache = cache
        self._documents = documents
        self._health = health
        self._credentials = credentials
        self._now = now
        self._pools: Memo[ModelPool | Problem] = Memo()
        self._tenants: Memo[Tenant | Problem] = Memo()
        self._loads = JobLoads(cache, documents, lambda body: parsed(RLJob, body))
        self._loads.left = self._queue_left
        self._tenancy_at, self._known_tenancy = -1, Tenancy()
        self._weighed: tuple[Tenancy, frozenset[str]] | None = None
        self._known_weights: Mapping[str, float] = {}
        self._first_seen: dict[str, float] = {}
        self._going_since: dict[str, float] = {}

    def job(
        self, target: Target, error: ActionError | None = None, is_refused: bool = False, exporter_refusal: str = ""
    ) -> JobSnapshot | None:
        """Return the snapshot of an RLJob, None if there is none.

        is_refused: the error is the API server's refusal. exporter_refusal: as in JobSnapshot.
        """
        body = self._cache.get(target)
        if body is None:
            return None
        meta, job = Meta.of(body), parsed(RLJob, body)
        key = subjects.job_key(meta.namespace, meta.name)
        document, progress = self._documents.document(key), self._documents.progress(key)
        owner, unread = self._tenancy().owner(meta.namespace), self._tenancy().unread(meta.namespace)
        admitted = progress is not None and progress.uid == meta.uid and progress.admitted and not progress.phase.final
        owned, bodies = self._belongings(("job", meta.namespace, meta.name))
        pods = _facts([pod for pod in bodies if _job_uid(pod) in (None, meta.uid)])
        is_exported = document is not None and document.uid == meta.uid and document.spec.export.is_reported
        identity = meta.namespace, meta.name, meta.uid
        return JobSnapshot(
            meta=meta,
            bus=self._health.state,
            job=job if isinstance(job, RLJob) else None,
            problem=job if isinstance(job, Problem) else "",
            refusal=error[1] if error is not None else "",
            refusal_reason=error[0] if error is not None else Reason.POD_REFUSED,
            is_refused=is_refused,
            status=body.get("status"),
            pools=tuple(map(self._job_pool, pools_of(body))),
            tenant=owner,
            unread_tenant=unread,
            tenant_missing=self._require_tenant and owner is None and not unread,
            queue_full=self._queue_full(body) if document is None else "",
            document=document,
            progress=progress,
            unreadable=self._documents.unreadable(key),
            owned=owned,
            pods=tuple(pod for pod in pods if pod.component != EXPORTER),
            credential=self._credentials.sandbox(*identity) if admitted else None,
            exporter_pods=tuple(pod for pod in pods if pod.component == EXPORTER),
            exporter_credential=self._credentials.exporter(*identity) if is_exported else None,
            exporter_refusal=exporter_refusal,
            report=self._documents.report(key),
            first_seen_at=self._first_seen.setdefault(meta.uid, self._now()),
            deletion_seen_at=self._deletion_seen(meta),
        )

    def pool(self, target: Target, error: ActionError | None = None) -> PoolSnapshot | None:
        """Return the snapshot of a ModelPool, None if there is none."""
        body = self._cache.get(target)
        if body is None:
            return None
        pool = self._pool(body)
        owned, pods = self._belongings(("pool", "", target.name))
        return PoolSnapshot(
            meta=Meta.of(body),
            bus=self._health.state,
            pool=pool if isinstance(pool, ModelPool) else None,
            problem=pool if isinstance(pool, Problem) else "",
            refusal=error[1] if error is not None else "",
            status=body.get("status"),
            jobs=self._loads.on_pool(target.name),
            owned=owned,
            pods=_facts(pods),
            credentials=self._credentials.pool(target.name),
        )

    def tenant(self, target: Target) -> TenantSnapshot | None:
        """Return the snapshot of a Tenant, None if there is none."""
        body = self._cache.get(target)
        if body is None:
            return None
        tenant, tenancy = self._tenant(body), self._tenancy()
        pools = (self._pool(pool) for pool in self._cache.all(MODELPOOLS))
        return TenantSnapshot(
            meta=Meta.of(body),
            bus=self._health.state,
            tenant=tenant if isinstance(tenant, Tenant) else None,
            problem=tenant if isinstance(tenant, Problem) else "",
            status=body.get("status"),
            lost=self._lost(tenant, tenancy),
            jobs=tuple(job for one in tenancy.namespaces(target.name) for job in self._loads.in_namespace(one)),
            weights=self._weights(),
            places={pool.metadata.name: pool.spec.places for pool in pools if isinstance(pool, ModelPool)},
            usage=self._documents.usage(target.name),
            owned=self._belongings(("tenant", "", target.name))[0],
        )

    def job_changed(self, target: Target) -> None:
        """Note that a job's object, document or progress changed."""
        self._loads.changed(target)

    def forget(self, body: Body) -> None:
        """Drop everything kept for a deleted object."""
        meta = body["metadata"]
        uid = str(meta["uid"])
        for kept in (self._pools, self._tenants):
            kept.forget(uid)
        self._first_seen.pop(uid, None)
        self._going_since.pop(uid, None)
        if resource_of(body) == RLJOBS:
            self._credentials.forget_job(meta["namespace"], meta["name"], uid)
        elif resource_of(body) == MODELPOOLS:
            self._credentials.forget_pool(meta["name"])

    def _deletion_seen(self, meta: Meta) -> float:
        """Return when this process first saw the deletion, 0.0 if the object is not being deleted.

        The deletionTimestamp is by the API server's clock, which may differ from ours.
        """
        return self._going_since.setdefault(meta.uid, self._now()) if meta.deleted_at is not None else 0.0

    def _belongings(self, group: Group) -> tuple[dict[OwnedKey, Body], list[Body]]:
        bodies = self._cache.group(group)
        pods = [body for body in bodies if resource_of(body) == PODS]
        owned = {
            (str(body["kind"]), target_of(body).name): body
            for body in bodies
            if resource_of(body) not in (PODS, RLJOBS)
        }
        return owned, pods

    def _job_pool(self, name: str) -> JobPool:
        body = self._cache.get(Target(MODELPOOLS, "", name))
        pool = self._pool(body) if body is not None else None
        return JobPool(
            name,
            pool if isinstance(pool, ModelPool) else None,
            pool if isinstance(pool, Problem) else "",
            body is not None and "deletionTimestamp" in body["metadata"],
            _facts(self._belongings(("pool", "", name))[1]),
        )

    def _lost(self, tenant: Tenant | Problem, tenancy: Tenancy) -> dict[str, str]:
        if not isinstance(tenant, Tenant):
            return {}
        owners = {
            one: owner.metadata.name for one in tenant.spec.namespaces if (owner := tenancy.owner(one)) is not None
        }
        return {one: owner for one, owner in owners.items() if owner != tenant.metadata.name}

    def _pool(self, body: Body) -> ModelPool | Problem:
        return self._pools.of(*_identity(body), lambda: parsed(ModelPool, body))

    def _tenant(self, body: Body) -> Tenant | Problem:
        return self._tenants.of(*_identity(body), lambda: parsed(Tenant, body))

    def _tenancy(self) -> Tenancy:
        """Return the Tenants by namespace; made anew only if the spec of one of them changed."""
        version = self._cache.tenants_version
        if self._tenancy_at != version:
            listed = [(body, self._tenant(body)) for body in self._cache.all(TENANTS)]
            self._known_tenancy = Tenancy(
                ListedTenant(Meta.of(body), namespaces_of(body), read if isinstance(read, Tenant) else None)
                for body, read in listed
            )
            self._tenancy_at = version
        return self._known_tenancy

    def _weights(self) -> Mapping[str, float]:
        """Return the weights of all tenants that have jobs. If they changed, the shares of all Tenants did."""
        tenancy, competing = self._tenancy(), self._loads.competing()
        if self._weighed != (tenancy, competing):
            before, self._known_weights = self._known_weights, tenancy.weights(competing)
            self._weighed = tenancy, competing
            if before != self._known_weights:
                self.shares_changed()
        return self._known_weights

    def _queue_full(self, body: Body) -> str:
        tenancy = self._tenancy()
        if not self._loads.is_full(body, tenancy):
            return ""
        queue = tenancy.queue(body["metadata"]["namespace"])
        return (
            f"over quota: older jobs take all {queue.limit} places in the queue of {queue.name} (quota.queuedJobs); "
            "this one enters it as they are admitted or end"
        )

    def _queue_left(self, namespace: str) -> None:
        for target in self._loads.next(namespace, self._tenancy()):
            self.room_found(target)


def parsed(kind: type[B], body: Body) -> B | Problem:
    """Parse a body; return a text with the broken rules if it is invalid.

    A stored object may be invalid: it may predate a rule, or belong to another version of the CRD.
    """
    body = unpacked(body)
    if problem := object_problem(body):
        return problem
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        return "; ".join(map(str, problems_of(kind, error)))


def _identity(body: Body) -> tuple[str, object]:
    return str(body["metadata"]["uid"]), body["metadata"]["resourceVersion"]


def _job_uid(pod: Body) -> str | None:
    return (pod["metadata"].get("labels") or {}).get(_UID_LABEL)


def _facts(pods: list[Body]) -> tuple[PodFacts, ...]:
    return tuple(sorted(map(pod_facts, pods), key=lambda pod: pod.name))

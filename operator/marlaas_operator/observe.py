"""Builds snapshots for the policies from the object cache and the bus view; makes no requests.

Parsed objects are memoized until their source changes.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import ValidationError

from marlaas_api import subjects
from marlaas_api.bus_users import CredentialIssuer
from marlaas_api.kinds import Kind, ModelPool, RLJob, Tenant
from marlaas_api.kinds.problems import problems_of
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
    stored_phase,
    target_of,
)
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.object_cache import Group, ObjectCache
from marlaas_operator.pod_facts import PodFacts, pod_facts
from marlaas_operator.snapshot import (
    JobLoad,
    JobPool,
    JobSnapshot,
    Meta,
    OwnedKey,
    PoolSnapshot,
    TenantSnapshot,
    by_precedence,
)

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
    """Builds snapshots. now: unix seconds."""

    def __init__(
        self,
        cache: ObjectCache,
        documents: JobDocuments,
        health: BusHealth,
        credentials: CredentialIssuer,
        now: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._documents = documents
        self._health = health
        self._credentials = credentials
        self._now = now
        self._pools: Memo[ModelPool | Problem] = Memo()
        self._tenants: Memo[Tenant | Problem] = Memo()
        self._loads: Memo[JobLoad] = Memo()
        self._first_seen: dict[str, float] = {}
        self._going_since: dict[str, float] = {}

    def job(self, target: Target, error: ActionError | None = None) -> JobSnapshot | None:
        """Return the snapshot of an RLJob, None if there is none."""
        body = self._cache.get(target)
        if body is None:
            return None
        meta, job = Meta.of(body), parsed(RLJob, body)
        key = subjects.job_key(meta.namespace, meta.name)
        progress = self._documents.progress(key)
        admitted = progress is not None and progress.uid == meta.uid and progress.admitted and not progress.phase.final
        owned, pods = self._belongings(("job", meta.namespace, meta.name))
        return JobSnapshot(
            meta=meta,
            bus=self._health.state,
            job=job if isinstance(job, RLJob) else None,
            problem=job if isinstance(job, Problem) else "",
            refusal=error[1] if error is not None else "",
            refusal_reason=error[0] if error is not None else Reason.POD_REFUSED,
            status=body.get("status"),
            pools=tuple(map(self._job_pool, pools_of(body))),
            tenants=self._all_tenants(),
            unread_tenant=self._unread_tenant(meta.namespace),
            document=self._documents.document(key),
            progress=progress,
            unreadable=self._documents.unreadable(key),
            owned=owned,
            pods=_facts([pod for pod in pods if _job_uid(pod) in (None, meta.uid)]),
            credential=self._credentials.sandbox(meta.namespace, meta.name, meta.uid) if admitted else None,
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
            jobs=self._loads_of(self._cache.group(("jobs of pool", "", target.name))),
            owned=owned,
            pods=_facts(pods),
            credentials=self._credentials.pool(target.name),
        )

    def tenant(self, target: Target) -> TenantSnapshot | None:
        """Return the snapshot of a Tenant, None if there is none."""
        body = self._cache.get(target)
        if body is None:
            return None
        tenant = self._tenant(body)
        pools = (self._pool(pool) for pool in self._cache.all(MODELPOOLS))
        return TenantSnapshot(
            meta=Meta.of(body),
            bus=self._health.state,
            tenant=tenant if isinstance(tenant, Tenant) else None,
            problem=tenant if isinstance(tenant, Problem) else "",
            status=body.get("status"),
            tenants=self._all_tenants(),
            jobs=self._loads_of(self._cache.all(RLJOBS)),
            places={pool.metadata.name: pool.spec.places for pool in pools if isinstance(pool, ModelPool)},
            usage=self._documents.usage(target.name),
            owned=self._belongings(("tenant", "", target.name))[0],
        )

    def forget(self, body: Body) -> None:
        """Drop everything kept for a deleted object."""
        meta = body["metadata"]
        uid = str(meta["uid"])
        for kept in (self._pools, self._tenants, self._loads):
            kept.forget(uid)
        self._first_seen.pop(uid, None)
        self._going_since.pop(uid, None)
        if resource_of(body) == RLJOBS:
            self._credentials.forget_sandbox(meta["namespace"], meta["name"], uid)
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

    def _pool(self, body: Body) -> ModelPool | Problem:
        return self._pools.of(*_identity(body), lambda: parsed(ModelPool, body))

    def _tenant(self, body: Body) -> Tenant | Problem:
        return self._tenants.of(*_identity(body), lambda: parsed(Tenant, body))

    def _all_tenants(self) -> tuple[Tenant, ...]:
        read = ((body, self._tenant(body)) for body in self._cache.all(TENANTS))
        return tuple(by_precedence([(Meta.of(body), tenant) for body, tenant in read if isinstance(tenant, Tenant)]))

    def _unread_tenant(self, namespace: str) -> str:
        bodies = [(Meta.of(body), body) for body in self._cache.all(TENANTS) if namespace in namespaces_of(body)]
        own = next(iter(by_precedence(bodies)), None)
        return target_of(own).name if own is not None and isinstance(self._tenant(own), Problem) else ""

    def _loads_of(self, bodies: list[Body]) -> tuple[JobLoad, ...]:
        return tuple(self._load(body) for body in bodies)

    def _load(self, body: Body) -> JobLoad:
        meta = body["metadata"]
        key = subjects.job_key(meta["namespace"], meta["name"])
        version = (meta.get("generation"), stored_phase(body), self._documents.revisions(key))

        def make() -> JobLoad:
            job = parsed(RLJob, body)
            document, progress = self._documents.document(key), self._documents.progress(key)
            own = document if document is not None and document.uid == meta["uid"] else None
            own_progress = progress if progress is not None and progress.uid == meta["uid"] else None
            if isinstance(job, Problem):
                return JobLoad.of_unread(body, own, own_progress)
            return JobLoad.of(job, own, own_progress)

        return self._loads.of(meta["uid"], version, make)


def parsed(kind: type[B], body: Body) -> B | Problem:
    """Parse a body; return a text with the broken rules if it is invalid.

    A stored object may be invalid: it may predate a rule, or belong to another version of the CRD.
    """
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

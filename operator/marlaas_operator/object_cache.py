"""Cache of the watched Kubernetes objects: raw bodies by target, indexed by the job, pool or Tenant that they belong to.

The cache may lag behind the API server. A body is replaced by an older one only if the API server itself was
restored to an older state. Every change queues the objects that it may affect (`after_change`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from marlaas_operator.cluster import Body, Resource, Target
from marlaas_operator.cluster.resources import (
    KINDS,
    MODELPOOLS,
    PODS,
    RLJOBS,
    TENANTS,
    namespaces_of,
    pools_of,
    slim,
    stored_phase,
    target_of,
    version_of,
)
from marlaas_operator.pod_facts import pod_facts

Request = tuple[Target, float]
"""An object to reconcile, and the delay in seconds. Objects with totals of many wait, to take several changes at
once.
"""

COUNT_AFTER_S = 1.0

Group = tuple[str, str, str]
"""(`job`, `pool` or `tenant`, namespace or empty, name): the object that another one belongs to; `jobs of pool`, `jobs of namespace` and
`tenants of namespace` likewise."""

JOB_LABEL, POOL_LABEL, TENANT_LABEL = "marlaas.dev/job", "marlaas.dev/pool", "marlaas.dev/tenant"
_LOST_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class KindSnapshot:
    """State of the cache for one kind at one moment.

    Attributes:
        bodies: body by target.
        lost: by uid, the resource version up to which the object is known as deleted.
    """

    bodies: Mapping[Target, Body]
    lost: Mapping[str, float]


class ObjectCache:
    """Cache of the cluster's objects. A late answer does not bring back a deleted object.

    release_namespace: namespace of the objects of pools and Tenants. Their labels in other namespaces are ignored,
    because tenants may set any label there.

    Attributes:
        enqueue: called with each object that a change may affect, and the delay in seconds; None: changes queue
            nothing.
        job_changed: called with each RLJob that changed.
        tenants_version: changes with the spec of any Tenant, and with their number.
        gone: called with the last body of a custom resource that was deleted or replaced.
    """

    def __init__(self, release_namespace: str) -> None:
        self.enqueue: Callable[[Target, float], None] | None = None
        self.gone: Callable[[Body], None] = lambda body: None
        self.job_changed: Callable[[Target], None] = lambda target: None
        self.tenants_version = 0
        self._release_namespace = release_namespace
        self._lost: dict[str, float] = {}
        self._bodies: dict[Resource, dict[Target, Body]] = defaultdict(dict)
        self._groups: dict[Group, set[Target]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(len(bodies) for bodies in self._bodies.values())

    def get(self, target: Target) -> Body | None:
        """Return the body, None if there is no such object."""
        return self._bodies[target.resource].get(target)

    def all(self, resource: Resource) -> list[Body]:
        """Return every object of a kind."""
        return list(self._bodies[resource].values())

    def group(self, group: Group) -> list[Body]:
        """Return every object that belongs to a job, a pool or a Tenant."""
        bodies = (self.get(target) for target in self._groups.get(group, ()))
        return [body for body in bodies if body is not None]

    def see(self, body: Body, *, own: bool = False) -> None:
        """Store a body that the server sent, unless it is older than the cached one or than a known deletion.

        own: the body is the result of our own write: do not queue the object itself.
        """
        target = target_of(body)
        before = self.get(target)
        if self._is_late(body) or (before is not None and version_of(body) <= version_of(before)):
            return
        body = slim(body)
        self._forget(target)
        self._bodies[target.resource][target] = body
        for group in self.groups_of(target, body):
            self._groups[group].add(target)
        self._note(target, before, body)
        if not own:
            self._changed(target, before, body)
        if before is not None and target.resource == RLJOBS and stored_phase(before) != stored_phase(body):
            self._enqueue(counters(self, body, None))  # the watch may report our own write before its response arrives

    def lose(self, target: Target, uid: str, version: float = math.inf) -> None:
        """Remove the object with this uid.

        version: resource version of the deletion; later bodies of this uid are accepted again. A label-selector
        watch also sends DELETED when an object loses the label, which it may regain.
        """
        before = self.get(target)
        if before is None or uid != before["metadata"]["uid"]:
            self._mark_lost(uid, version)
            return
        self._mark_lost(uid, max(version, version_of(before)))
        self._forget(target)
        self._note(target, before, None)
        self._changed(target, before, None)

    def replace(self, bodies: Iterable[Body], before: KindSnapshot) -> int:
        """Replace a kind's objects by a complete list; remove those missing from it.

        Args:
            before: snapshot of the kind, taken before the list was requested.

        Returns:
            The number of objects that are older in the list than in the cache. A list is never late, so the API
                server's store was restored, and the list is taken.
        """
        present, restored = set(), 0
        for body in bodies:
            target = target_of(body)
            present.add(target)
            if self._was_restored(target, body, before):
                restored += 1
                self._start_over(target, body)
            self.see(body)
        for target, known in before.bodies.items():
            if target not in present:
                self.lose(target, known["metadata"]["uid"], 0)
        return restored

    def targets(self, resource: Resource) -> list[Target]:
        """Return the targets of all cached objects of a kind."""
        return list(self._bodies[resource])

    def known(self, resource: Resource) -> KindSnapshot:
        """Return a snapshot of a kind; take it before requesting a list for `replace`."""
        return KindSnapshot(dict(self._bodies[resource]), dict(self._lost))

    def groups_of(self, target: Target, body: Body) -> Iterator[Group]:
        """Yield the groups of an object: by its labels; for a job or a Tenant by its namespaces and the pools in its spec."""
        labels = body["metadata"].get("labels") or {}
        if target.resource == RLJOBS:
            yield "jobs of namespace", "", target.namespace
            yield from (("jobs of pool", "", name) for name in pools_of(body))
        elif target.resource == TENANTS:
            yield from (("tenants of namespace", "", name) for name in namespaces_of(body))
        elif JOB_LABEL in labels:
            yield "job", target.namespace, labels[JOB_LABEL]
        elif POOL_LABEL in labels and target.namespace == self._release_namespace:
            yield "pool", "", labels[POOL_LABEL]
        elif TENANT_LABEL in labels and target.namespace == self._release_namespace:
            yield "tenant", "", labels[TENANT_LABEL]

    def _note(self, target: Target, before: Body | None, after: Body | None) -> None:
        if target.resource == RLJOBS:
            self.job_changed(target)
        elif target.resource == TENANTS and _identity(before) != _identity(after):
            self.tenants_version += 1

    def _changed(self, target: Target, before: Body | None, after: Body | None) -> None:
        self._enqueue(after_change(self, target, before, after))
        if before is not None and target.resource in KINDS and not _is_same(before, after):
            self.gone(before)

    def _enqueue(self, requests: Iterable[Request]) -> None:
        if self.enqueue is not None:
            for target, delay_s in requests:
                self.enqueue(target, delay_s)

    def _is_late(self, body: Body) -> bool:
        """Return whether the body predates the object's deletion.

        An object that only lost our label may return with a later version.
        """
        return version_of(body) <= self._lost.get(body["metadata"]["uid"], -1)

    def _was_restored(self, target: Target, body: Body, before: KindSnapshot) -> bool:
        """Return whether the list shows an older state than the cache had when the list was requested.

        That is so if the cached body is newer, or if the object was known as deleted, and no event has changed
        that since.
        """
        known, uid = self.get(target), body["metadata"]["uid"]
        if known is not None and known is before.bodies.get(target) and version_of(body) < version_of(known):
            return True
        return self._is_late(body) and before.lost.get(uid) == self._lost[uid]

    def _start_over(self, target: Target, body: Body) -> None:
        known = self.get(target)
        self._lost.pop(body["metadata"]["uid"], None)
        if known is not None:
            self._forget(target)
            self._note(target, known, None)
            self._changed(target, known, None)

    def _mark_lost(self, uid: str, version: float) -> None:
        self._lost[uid] = max(version, self._lost.pop(uid, version))
        if len(self._lost) > _LOST_KEPT:
            del self._lost[next(iter(self._lost))]

    def _forget(self, target: Target) -> None:
        before = self._bodies[target.resource].pop(target, None)
        for group in self.groups_of(target, before) if before is not None else ():
            self._groups[group].discard(target)
            if not self._groups[group]:
                del self._groups[group]


def _is_same(before: Body, after: Body | None) -> bool:
    """Return whether both bodies have the same uid, so are not two objects of the same name."""
    return after is not None and before["metadata"]["uid"] == after["metadata"]["uid"]


def after_change(cache: ObjectCache, target: Target, before: Body | None, after: Body | None) -> Iterator[Request]:
    """Yield the objects that a change in the cluster may affect."""
    if target.resource == RLJOBS:
        yield target, 0.0
        if _identity(before) != _identity(after):
            yield from counters(cache, before, after)
    elif target.resource == MODELPOOLS:
        yield target, 0.0
        if _identity(before) != _identity(after):
            yield from _jobs_of_pool(cache, target.name)
            yield from ((tenant, COUNT_AFTER_S) for tenant in cache.targets(TENANTS))  # a held share is one of places
    elif target.resource == TENANTS:
        yield target, 0.0
        if _identity(before) != _identity(after):
            yield from _jobs_of_tenant(cache, before, after)
            yield from ((tenant, 0.0) for tenant in cache.targets(TENANTS))
    else:
        yield from _owners(cache, target, before, after)


def after_bus_change(cache: ObjectCache, key: str) -> Iterator[Request]:
    """Yield the objects that a change of a job's document or progress may affect."""
    namespace, _, name = key.partition(".")
    target = Target(RLJOBS, namespace, name)
    body = cache.get(target)
    if body is not None:
        yield target, 0.0
        yield from counters(cache, body, None)


def counters(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Request]:
    """Yield reconciles, with their delays, of the pools and Tenants whose numbers of jobs a change of a job affects. before, after: its bodies; None: absent."""
    for body in (before, after):
        if body is not None:
            yield from ((Target(MODELPOOLS, "", pool), COUNT_AFTER_S) for pool in pools_of(body))
            own = cache.group(("tenants of namespace", "", body["metadata"]["namespace"]))
            yield from ((target_of(tenant), COUNT_AFTER_S) for tenant in own)


def _jobs_of_pool(cache: ObjectCache, name: str) -> Iterator[Request]:
    """Return every job that names a pool."""
    return ((target_of(job), 0.0) for job in cache.group(("jobs of pool", "", name)))


def _jobs_of_tenant(cache: ObjectCache, before: Body | None, after: Body | None) -> Iterator[Request]:
    """Return every job whose weight may have changed with a Tenant."""
    bodies = [body for body in (before, after) if body is not None]
    namespaces = {namespace for body in bodies for namespace in namespaces_of(body)}
    return ((target_of(job), 0.0) for one in namespaces for job in cache.group(("jobs of namespace", "", one)))


def _owners(cache: ObjectCache, target: Target, before: Body | None, after: Body | None) -> Iterator[Request]:
    if target.resource == PODS and before is not None and after is not None and pod_facts(before) == pod_facts(after):
        return
    for body in (before, after):
        for what, namespace, name in cache.groups_of(target, body) if body is not None else ():
            if what == "job":
                yield Target(RLJOBS, namespace, name), 0.0
            elif what == "tenant":
                yield Target(TENANTS, "", name), 0.0
            elif what == "pool":
                yield Target(MODELPOOLS, "", name), 0.0
                if target.resource == PODS:
                    yield from _jobs_of_pool(cache, name)


def _identity(body: Body | None) -> object:
    """Return uid, generation and deletion time, which change with the spec or a deletion but not with the status."""
    if body is None:
        return None
    meta = body["metadata"]
    return meta["uid"], meta.get("generation"), meta.get("deletionTimestamp")

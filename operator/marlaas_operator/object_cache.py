"""Cache of the watched Kubernetes objects: raw bodies by target, indexed by the job or pool that they belong to.

The cache may lag behind the API server. A body is replaced by an older one only if the API server itself was
restored to an older state.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marlaas_operator.cluster import Body, Resource, Target
from marlaas_operator.cluster.resources import RLJOBS, target_of

Changed = Callable[[Target, Body | None, Body | None], None]
"""Callback for a change: the object, its body before (None: it did not exist) and after (None: deleted)."""

Group = tuple[str, str, str]
"""(`job`, `pool` or `jobs of pool`, namespace or empty, name): the job or pool that an object belongs to."""

JOB_LABEL, POOL_LABEL = "marlaas.dev/job", "marlaas.dev/pool"
_DROPPED = ("managedFields", "selfLink")
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

    release_namespace: namespace of the pools' objects. Pool labels in other namespaces are ignored, because
    tenants may set any label there.
    """

    def __init__(self, changed: Changed, release_namespace: str) -> None:
        self._changed = changed
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
        """Return every object that belongs to a job or a pool."""
        bodies = (self.get(target) for target in self._groups.get(group, ()))
        return [body for body in bodies if body is not None]

    def see(self, body: Body, *, own: bool = False) -> None:
        """Store a body that the server sent, unless it is older than the cached one or than a known deletion.

        own: the body is the result of our own write; do not call `changed`.
        """
        target = target_of(body)
        before = self.get(target)
        if self._is_late(body) or (before is not None and not _newer(body, before)):
            return
        body = _slim(body)
        self._forget(target)
        self._bodies[target.resource][target] = body
        for group in self.groups_of(target, body):
            self._groups[group].add(target)
        if not own:
            self._changed(target, before, body)

    def lose(self, target: Target, uid: str, version: float = math.inf) -> None:
        """Remove the object with this uid.

        version: resource version of the deletion; later bodies of this uid are accepted again. A label-selector
        watch also sends DELETED when an object loses the label, which it may regain.
        """
        before = self.get(target)
        if before is None or uid != before["metadata"]["uid"]:
            self._bury(uid, version)
            return
        self._bury(uid, max(version, _version(before)))
        self._forget(target)
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
        """Yield the groups of an object: by its labels, or for a job by the pool in its spec."""
        labels = body["metadata"].get("labels") or {}
        if target.resource == RLJOBS:
            yield "jobs of pool", "", pool_of(body)
        elif JOB_LABEL in labels:
            yield "job", target.namespace, labels[JOB_LABEL]
        elif POOL_LABEL in labels and target.namespace == self._release_namespace:
            yield "pool", "", labels[POOL_LABEL]

    def _is_late(self, body: Body) -> bool:
        """Return whether the body predates the object's deletion.

        An object that only lost our label may return with a later version.
        """
        return _version(body) <= self._lost.get(body["metadata"]["uid"], -1)

    def _was_restored(self, target: Target, body: Body, before: KindSnapshot) -> bool:
        """Return whether the list shows an older state than the cache had when the list was requested.

        That is so if the cached body is newer, or if the object was known as deleted, and no event has changed
        that since.
        """
        known, uid = self.get(target), body["metadata"]["uid"]
        if known is not None and known is before.bodies.get(target) and _version(body) < _version(known):
            return True
        return self._is_late(body) and before.lost.get(uid) == self._lost[uid]

    def _start_over(self, target: Target, body: Body) -> None:
        known = self.get(target)
        self._lost.pop(body["metadata"]["uid"], None)
        if known is not None:
            self._forget(target)
            self._changed(target, known, None)

    def _bury(self, uid: str, version: float) -> None:
        self._lost[uid] = max(version, self._lost.pop(uid, version))
        if len(self._lost) > _LOST_KEPT:
            del self._lost[next(iter(self._lost))]

    def _forget(self, target: Target) -> None:
        before = self._bodies[target.resource].pop(target, None)
        for group in self.groups_of(target, before) if before is not None else ():
            self._groups[group].discard(target)
            if not self._groups[group]:
                del self._groups[group]


def pool_of(job: Body) -> str:
    """Return the name of the job's pool; empty if it names none.

    A stored job may predate the rules of its kind.
    """
    reference = _mapping(_mapping(job.get("spec")).get("poolRef"))
    return str(reference.get("name") or "")


def namespaces_of(tenant: Body) -> tuple[str, ...]:
    """Return the namespaces in a Tenant's spec, even if the Tenant does not parse."""
    listed = _mapping(tenant.get("spec")).get("namespaces")
    return tuple(map(str, listed)) if isinstance(listed, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _newer(body: Body, known: Body) -> bool:
    """Compare resource versions: those of one kind increase monotonically (guaranteed since Kubernetes 1.35)."""
    return _version(body) > _version(known)


def _version(body: Body) -> int:
    return int(body["metadata"]["resourceVersion"])


def _slim(body: Body) -> Body:
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key not in _DROPPED}}

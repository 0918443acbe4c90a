"""What the watches and lists said last of every object that matters: raw bodies by target, found by what they belong to.

A hint, not a truth: it may lag behind the API server, and goes back behind what was once seen of an object only if the server itself does.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marlaas_operator.cluster import Body, Resource, Target
from marlaas_operator.cluster.resources import RLJOBS, target_of

Changed = Callable[[Target, Body | None, Body | None], None]
"""Told of a change: the object, and its body before and after (None: it did not, or does no longer, exist)."""

Group = tuple[str, str, str]
"""(`job` or `pool`, namespace or empty, name): whose an object is."""

JOB_LABEL, POOL_LABEL = "marlaas.dev/job", "marlaas.dev/pool"
_DROPPED = ("managedFields", "selfLink")
_LOST_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class KindSnapshot:
    """What was known of a kind at a moment: bodies by target, and up to which version an object (by uid) was gone."""

    bodies: Mapping[Target, Body]
    lost: Mapping[str, float]


class ObjectCache:
    """The operator's memory of the cluster. What has gone does not come back with an answer that was late.

    release_namespace: where pools have what is theirs; what is labelled so elsewhere is somebody's who would like to be heard as a pool.
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
        """The body, None if there is no such object."""
        return self._bodies[target.resource].get(target)

    def all(self, resource: Resource) -> list[Body]:
        """Every object of a kind."""
        return list(self._bodies[resource].values())

    def group(self, group: Group) -> list[Body]:
        """Everything that belongs to a job or a pool."""
        bodies = (self.get(target) for target in self._groups.get(group, ()))
        return [body for body in bodies if body is not None]

    def see(self, body: Body, *, own: bool = False) -> None:
        """An object as the server showed it. What is older than what is known is ignored. own: we wrote that, it is no news."""
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
        """The object with this uid is gone. version: up to which it is; a watch by label also calls gone what has lost the label and may have it again."""
        before = self.get(target)
        if before is None or uid != before["metadata"]["uid"]:
            self._bury(uid, version)
            return
        self._bury(uid, max(version, _version(before)))
        self._forget(target)
        self._changed(target, before, None)

    def replace(self, bodies: Iterable[Body], before: KindSnapshot) -> int:
        """A whole list of a kind, asked for after `before` was known: what is not in it is gone.

        Returns how many objects are older in it than before: a list is never late, so the API server itself went back (its store was restored), and is believed.
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
        """Every known object of a kind."""
        return list(self._bodies[resource])

    def known(self, resource: Resource) -> KindSnapshot:
        """What is known of a kind now, for a list that is about to be asked for."""
        return KindSnapshot(dict(self._bodies[resource]), dict(self._lost))

    def groups_of(self, target: Target, body: Body) -> Iterator[Group]:
        """Whose an object is: by its labels, and a job by the pool that it names."""
        labels = body["metadata"].get("labels") or {}
        if target.resource == RLJOBS:
            yield "jobs of pool", "", pool_of(body)
        elif JOB_LABEL in labels:
            yield "job", target.namespace, labels[JOB_LABEL]
        elif POOL_LABEL in labels and target.namespace == self._release_namespace:
            yield "pool", "", labels[POOL_LABEL]

    def _is_late(self, body: Body) -> bool:
        """Whether it was said before the object went. One that had only lost our label may come back with a later version."""
        return _version(body) <= self._lost.get(body["metadata"]["uid"], -1)

    def _was_restored(self, target: Target, body: Body, before: KindSnapshot) -> bool:
        """Whether what was known when the list was asked for, and has not been contradicted since, is newer than the list, or held it for gone."""
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
    """Name of the pool that a job names; empty if it names none: what is stored may be older than the rules of its kind."""
    reference = _mapping(_mapping(job.get("spec")).get("poolRef"))
    return str(reference.get("name") or "")


def namespaces_of(tenant: Body) -> tuple[str, ...]:
    """Namespaces that a Tenant lists, whether it parses or not."""
    listed = _mapping(tenant.get("spec")).get("namespaces")
    return tuple(map(str, listed)) if isinstance(listed, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _newer(body: Body, known: Body) -> bool:
    """Resource versions of one kind count upwards (since Kubernetes 1.35 that is a promise)."""
    return _version(body) > _version(known)


def _version(body: Body) -> int:
    return int(body["metadata"]["resourceVersion"])


def _slim(body: Body) -> Body:
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key not in _DROPPED}}

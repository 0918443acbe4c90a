"""What the watches and lists said last of every object that matters: raw bodies by target, found by what they belong to.

A hint, not a truth: it may lag behind the API server, never go back behind what was once seen of an object.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from marlaas_operator.cluster import Body, Resource, Target
from marlaas_operator.cluster.resources import RLJOBS, target_of

Changed = Callable[[Target, Body | None, Body | None], None]
"""Told of a change: the object, and its body before and after (None: it did not, or does no longer, exist)."""

Group = tuple[str, str, str]
"""(`job` or `pool`, namespace or empty, name): whose an object is."""

JOB_LABEL, POOL_LABEL = "marlaas.dev/job", "marlaas.dev/pool"
_DROPPED = ("managedFields", "selfLink")


class Watched:
    """The operator's memory of the cluster."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
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
        if before is not None and not _newer(body, before):
            return
        body = _slim(body)
        self._forget(target)
        self._bodies[target.resource][target] = body
        for group in groups_of(target, body):
            self._groups[group].add(target)
        if not own:
            self._changed(target, before, body)

    def lose(self, target: Target, uid: str | None = None) -> None:
        """An object is gone; with `uid`, only if it is that one which is remembered."""
        before = self.get(target)
        if before is not None and uid in (None, before["metadata"]["uid"]):
            self._forget(target)
            self._changed(target, before, None)

    def replace(self, resource: Resource, bodies: Iterable[Body], known_before: Iterable[Target]) -> None:
        """A whole list of a kind: what was known before the list was asked for and is not in it is gone."""
        present = set()
        for body in bodies:
            present.add(target_of(body))
            self.see(body)
        for target in known_before:
            if target not in present:
                self.lose(target)

    def targets(self, resource: Resource) -> list[Target]:
        """Every known object of a kind."""
        return list(self._bodies[resource])

    def _forget(self, target: Target) -> None:
        before = self._bodies[target.resource].pop(target, None)
        for group in groups_of(target, before) if before is not None else ():
            self._groups[group].discard(target)
            if not self._groups[group]:
                del self._groups[group]


def groups_of(target: Target, body: Body) -> Iterator[Group]:
    """Whose an object is: by its labels, and a job by the pool that it names."""
    labels = body["metadata"].get("labels") or {}
    if target.resource == RLJOBS:
        yield "jobs of pool", "", str(body["spec"]["poolRef"]["name"])
    elif JOB_LABEL in labels:
        yield "job", target.namespace, labels[JOB_LABEL]
    elif POOL_LABEL in labels:
        yield "pool", "", labels[POOL_LABEL]


def _newer(body: Body, known: Body) -> bool:
    """Resource versions of one kind count upwards (since Kubernetes 1.35 that is a promise)."""
    return int(body["metadata"]["resourceVersion"]) > int(known["metadata"]["resourceVersion"])


def _slim(body: Body) -> Body:
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key not in _DROPPED}}

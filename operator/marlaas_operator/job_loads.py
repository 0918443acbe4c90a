"""Loads of all RLJobs, by namespace and by pool, and the queues of tenants. Only jobs that changed are read again.

A tenant's queue holds at most `quota.queuedJobs` published jobs that are neither admitted nor ended. The oldest of its other jobs enter as
room appears; until then a job has a status, and costs the bus and the orchestrator nothing. A namespace without a Tenant has a queue of its own.
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from marlaas_api import subjects
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.status import unix_seconds
from marlaas_api.reasons import Reason
from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import pools_of, stored_reason
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.snapshot import JobLoad, slots_of
from marlaas_operator.tenancy import Tenancy

_WAITS_ELSEWHERE = frozenset(
    (
        Reason.POOL_NOT_FOUND,
        Reason.NEVER_FITS,
        Reason.NAMESPACE_NOT_ALLOWED,
        Reason.INVALID_SPEC,
        Reason.TENANT_REQUIRED,
        Reason.BUS_UNAVAILABLE,
    )
)
"""Reasons of an unpublished job that room in the queue would not remove: it stands in no other job's way."""

Place = tuple[float, str]
"""Order of a namespace's jobs: creation time and name."""


@dataclass(slots=True)
class _Entry:
    """What is known of one job. place: None unless it waits for room in its queue."""

    load: JobLoad
    pools: tuple[str, ...]
    place: Place | None


@dataclass(slots=True)
class _Namespace:
    """Jobs of one namespace. num_queued: that take room of the queue. waiting: those that wait for room, in order."""

    loads: dict[Target, JobLoad] = field(default_factory=dict)
    num_queued: int = 0
    num_competing: int = 0
    waiting: list[tuple[Place, Target]] = field(default_factory=list)


class JobLoads:
    """Loads by namespace and pool, and room in the queues.

    Args:
        parse: parses the body of an RLJob; returns a text if it is invalid.

    Attributes:
        left: called with each namespace of which a job has left the queue, or has gone before it entered.
    """

    def __init__(self, cache: ObjectCache, documents: JobDocuments, parse: Callable[[Body], RLJob | str]) -> None:
        self.left: Callable[[str], None] = lambda namespace: None
        self._cache = cache
        self._documents = documents
        self._parse = parse
        self._stale: set[Target] = set()
        self._slots: dict[Target, tuple[object, Mapping[str, int] | None]] = {}
        self._entries: dict[Target, _Entry] = {}
        self._namespaces: dict[str, _Namespace] = defaultdict(_Namespace)
        self._pools: dict[str, dict[Target, JobLoad]] = defaultdict(dict)
        self._competing: frozenset[str] | None = frozenset()

    def changed(self, target: Target) -> None:
        """Note that a job's object, document or progress changed; it is read again at the next question."""
        self._stale.add(target)

    def in_namespace(self, namespace: str) -> tuple[JobLoad, ...]:
        """Return the loads of a namespace's jobs."""
        self._refresh()
        return tuple(self._namespaces[namespace].loads.values()) if namespace in self._namespaces else ()

    def on_pool(self, pool: str) -> tuple[JobLoad, ...]:
        """Return the loads of the jobs that name a pool."""
        self._refresh()
        return tuple(self._pools[pool].values()) if pool in self._pools else ()

    def competing(self) -> frozenset[str]:
        """Return the namespaces with jobs that are admitted or wait; the same object as long as they are the same."""
        self._refresh()
        if self._competing is None:
            self._competing = frozenset(name for name, one in self._namespaces.items() if one.num_competing)
        return self._competing

    def is_full(self, body: Body, tenancy: Tenancy) -> bool:
        """Return whether the queue has no room for a job that is not published: older ones take all of it."""
        self._refresh()
        queue, place = tenancy.queue(body["metadata"]["namespace"]), _place(body)
        lists = [self._namespaces[one] for one in queue.namespaces if one in self._namespaces]
        taken = sum(one.num_queued + bisect.bisect_left(one.waiting, place, key=lambda two: two[0]) for one in lists)
        return taken >= queue.limit

    def next(self, namespace: str, tenancy: Tenancy) -> list[Target]:
        """Return the jobs that were told to wait for room in a namespace's queue and have it now."""
        self._refresh()
        queue = tenancy.queue(namespace)
        lists = [self._namespaces[one] for one in queue.namespaces if one in self._namespaces]
        room = max(0, queue.limit - sum(one.num_queued for one in lists))
        oldest = heapq.merge(*(one.waiting for one in lists), key=lambda pair: pair[0])
        return [target for _, target in itertools.islice(oldest, room) if self._was_told(target)]

    def _was_told(self, target: Target) -> bool:
        body = self._cache.get(target)
        return body is not None and stored_reason(body) == Reason.OVER_QUOTA

    def _refresh(self) -> None:
        """Read the changed jobs again."""
        left = []
        while self._stale:
            target = self._stale.pop()
            before, after = self._entries.pop(target, None), self._read(target)
            if before is not None:
                self._drop(target, before)
            if after is not None:
                self._add(target, after)
            if before is not None and _takes_room(before) and not (after is not None and _takes_room(after)):
                left.append(target.namespace)
        for namespace in left:
            self.left(namespace)

    def _read(self, target: Target) -> _Entry | None:
        body = self._cache.get(target)
        if body is None:
            self._slots.pop(target, None)
            return None
        uid, key = body["metadata"]["uid"], subjects.job_key(target.namespace, target.name)
        document, progress = self._documents.document(key), self._documents.progress(key)
        own = document if document is not None and document.uid == uid else None
        load = JobLoad.of(
            body, self._slots_of(target, body), own, progress if progress is not None and progress.uid == uid else None
        )
        return _Entry(load, pools_of(body), _place(body) if _waits_for_room(body, load) else None)

    def _slots_of(self, target: Target, body: Body) -> Mapping[str, int] | None:
        """Return the slots by pool, None if the job does not parse. Only another spec has others."""
        version = (body["metadata"]["uid"], body["metadata"].get("generation"))
        known = self._slots.get(target)
        if known is None or known[0] != version:
            job = self._parse(body)
            known = self._slots[target] = version, slots_of(job) if isinstance(job, RLJob) else None
        return known[1]

    def _add(self, target: Target, entry: _Entry) -> None:
        self._entries[target] = entry
        mine = self._namespaces[target.namespace]
        mine.loads[target] = entry.load
        mine.num_queued += entry.load.is_queued
        self._compete(mine, entry.load.competes)
        if entry.place is not None:
            bisect.insort(mine.waiting, (entry.place, target), key=lambda pair: pair[0])
        for pool in entry.pools:
            self._pools[pool][target] = entry.load

    def _drop(self, target: Target, entry: _Entry) -> None:
        mine = self._namespaces[target.namespace]
        del mine.loads[target]
        mine.num_queued -= entry.load.is_queued
        self._compete(mine, -entry.load.competes)
        if entry.place is not None:
            del mine.waiting[bisect.bisect_left(mine.waiting, entry.place, key=lambda pair: pair[0])]
        for pool in entry.pools:
            del self._pools[pool][target]

    def _compete(self, mine: _Namespace, change: int) -> None:
        had = mine.num_competing > 0
        mine.num_competing += change
        if had != (mine.num_competing > 0):
            self._competing = None


def _takes_room(entry: _Entry) -> bool:
    return entry.load.is_queued or entry.place is not None


def _place(body: Body) -> Place:
    metadata = body["metadata"]
    return unix_seconds(metadata.get("creationTimestamp")) or 0.0, metadata["name"]


def _waits_for_room(body: Body, load: JobLoad) -> bool:
    """Return whether room in the queue is all that an unpublished job may wait for."""
    going = load.published or load.phase.final or "deletionTimestamp" in body["metadata"]
    return not going and stored_reason(body) not in _WAITS_ELSEWHERE

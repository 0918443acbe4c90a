"""A trainer's inputs at one moment: jobs, progress, policy keys, and live trainers, from caches of four buckets."""

import asyncio
from collections.abc import Callable, Collection, Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bus, Entry
from marlaas_api.messages import JobDocument, PolicyRecord, Progress, ReplicaReport
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.placement import AgentLoad, place, rank
from marlaas_worker.trainer.assignment import Assignment, Work, assignments, ended_assignments, recent_costs

# More than two intervals of re-reads, and less than the lifetime of a live trainer's report.
MAX_AGE_S = 8.0


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """The cached state of an agent's policy key."""

    entry: Entry
    """Key and revision for a compare-and-set. `data` is None if the key is deleted, empty if it was parsed, else the bytes that could not be."""
    record: PolicyRecord | None
    """The parsed record; None if the key is deleted or unreadable."""


@dataclass(frozen=True, slots=True)
class View:
    """Jobs, policy keys and reports, from which a trainer decides which agents to train, to release and to clean up after."""

    wanted: dict[str, Assignment]
    """Agents of admitted, unfinished jobs, by policy key."""
    ended: dict[str, Assignment]
    """Agents of jobs that have ended, by policy key."""
    known: dict[str, PolicyEntry]
    """All cached policy keys, also of other pools, by key."""
    live: frozenset[str]
    """Names of this pool's trainers with a live report."""
    refused: dict[str, frozenset[str]]
    """By trainer, the policy keys of agents that it does not train at present."""
    jobs: frozenset[JobRef]
    """All jobs with a document."""
    work: tuple[Work, ...] = ()
    """The recent work that each trainer reports."""

    @property
    def holders(self) -> set[str]:
        """Trainers that hold the lease of a wanted agent, or of one whose job has ended."""
        records = (known.record for key, known in self.known.items() if key in self.wanted or key in self.ended)
        return {record.holder for record in records if record is not None and record.holder}

    def left_behind(
        self, trainer: str, running: Container[str], is_gone: Callable[[str], bool], cleaned: Container[AgentRef]
    ) -> list[Assignment]:
        """Return the agents whose job has ended and whose lease, consumer or unreferenced blobs may remain.

        One of the live trainers cleans up after an agent whose lease was released.

        Args:
            trainer: name of this trainer. Its leases of agents that are not in `running` remain from an earlier task or process.
            running: policy keys of the agents that have a task on this trainer.
            is_gone: returns whether the named holder of a lease no longer runs.
            cleaned: ended agents after which this trainer has cleaned up.
        """
        found = []
        for key, assignment in self.ended.items():
            record = self._record(key)
            if key in running or record is None or record.uid != assignment.ref.uid:
                continue
            holder = record.holder or max(self.live | {trainer}, key=lambda name: rank(key, name))
            is_clean = not record.holder and assignment.agent_ref in cleaned
            if not is_clean and (holder == trainer or is_gone(holder)):
                found.append(assignment)
        return found

    def unused_leases(self, trainer: str, running: Container[str], mine: Container[str]) -> list[Assignment]:
        """Return the wanted agents whose lease a trainer holds without training them. No other trainer may bind them.

        The cause is a failed release, or a restart of the trainer under the same name.

        Args:
            trainer: name of the trainer.
            running: policy keys of the agents that have a task on the trainer.
            mine: policy keys of the agents that are placed on the trainer.
        """
        held = [key for key in self.wanted if self._holder(key) == trainer]
        return [self.wanted[key] for key in held if key not in running and key not in mine]

    def placed_on(self, trainer: str, refused: Collection[str]) -> frozenset[str]:
        """Return the agents that a trainer has to train, by policy key.

        trainer: name; it counts as live even if its own report is not cached. refused: policy keys of agents that it does not
        train at present, or that are about to leave it.
        """
        others = {name: keys for name, keys in self.refused.items() if name != trainer}
        refusing = {**others, trainer: frozenset(refused)}
        left = [key for key in self.wanted if not self.wanted[key].is_complete(self._record(key))]
        candidates = {
            key: AgentLoad(
                cost, self._holder(key), refused=frozenset(name for name, keys in refusing.items() if key in keys)
            )
            for key, cost in recent_costs(sorted(left), self.work).items()
        }
        placed = place(candidates, self.live | {trainer})
        return frozenset(key for key, name in placed.items() if name == trainer)

    def _record(self, key: str) -> PolicyRecord | None:
        return self.known[key].record if key in self.known else None

    def _holder(self, key: str) -> str:
        """Return the name of the trainer that holds an agent's lease for the present job; empty: none."""
        record = self._record(key)
        return "" if record is None or record.uid != self.wanted[key].ref.uid else record.holder


class TrainerCaches:
    """Caches of jobs, progress, policy keys, and reports of the pool's trainers.

    Args:
        bus: the bus whose buckets are cached.
        pool: name of the pool.
        changed: called after a change of a job, a change of progress that affects a trainer (`what_decides`), and the release of an
            agent's lease. Changed reports do not call it.
    """

    def __init__(self, bus: Bus, pool: str, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._notify = changed
        self._prefix = subjects.replica_key("trainer", pool, "")
        self._jobs = BucketCache(lambda: bus.bucket(subjects.JOBS), JobDocument, lambda _: changed())
        self._progress = BucketCache(
            lambda: bus.bucket(subjects.PROGRESS), Progress, lambda _: changed(), relevant=what_decides
        )
        self._policy = BucketCache(lambda: bus.bucket(subjects.POLICY), PolicyRecord, self._policy_changed)
        self._trainers = BucketCache(
            lambda: bus.bucket(subjects.REPLICAS), ReplicaReport, lambda _: None, prefix=self._prefix
        )
        self._all: Sequence[BucketCache[Any]] = (self._jobs, self._progress, self._policy, self._trainers)

    async def load(self) -> None:
        """Read all four buckets once, so that no decision depends on partial state. Raises BusUnavailable."""
        for cache in self._all:
            await cache.refresh()

    def current(self) -> bool:
        """Return whether all four buckets were read in the last MAX_AGE_S. False: the bus does not answer at present."""
        oldest = asyncio.get_running_loop().time() - MAX_AGE_S
        return all(cache.read_at is not None and cache.read_at >= oldest for cache in self._all)

    async def follow(self) -> None:
        """Keep the caches up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in self._all:
                group.create_task(cache.follow())

    def view(self) -> View:
        """Return the state now. A policy key that cannot be parsed has no record; `PolicyKey.bind` raises the cause."""
        documents = [document for _, document, _ in self._jobs.items()]
        progress = {key: one for key, one, _ in self._progress.items()}
        wanted = assignments(documents, progress, self._pool)
        ended = ended_assignments(documents, progress, self._pool)
        known = {key: PolicyEntry(entry, self._record(key)) for key, entry in self._policy.entries()}
        live = frozenset(key.removeprefix(self._prefix) for key in self._trainers.present())
        reports = {key.removeprefix(self._prefix): report for key, report, _ in sorted(self._trainers.items())}
        refused = {name: frozenset(report.refused) for name, report in reports.items()}
        work = tuple(report.agent_work for report in reports.values())
        jobs = frozenset(document.ref for document in documents)
        return View(wanted, ended, known, live, refused, jobs, work)

    def policy(self, key: str) -> PolicyEntry | None:
        """Return the cached state of a policy key; None if the cache has none."""
        entry = self._policy.entry(key)
        return None if entry is None else PolicyEntry(entry, self._record(key))

    def _record(self, key: str) -> PolicyRecord | None:
        return None if self._policy.unreadable(key) else self._policy.get(key)

    def version(self, assignment: Assignment) -> int:
        """Return an agent's committed version, -1 before the first."""
        record = self._policy.get(assignment.policy_key)
        return -1 if record is None or record.uid != assignment.ref.uid else record.version

    async def read_policy(self, key: str) -> PolicyEntry | None:
        """Read an agent's policy key from the bus's leader, and return it. Raises BusUnavailable."""
        await self._policy.read(key)
        return self.policy(key)

    def _policy_changed(self, key: str) -> None:
        record = self._policy.get(key)
        if record is not None and not record.holder:  # released: another trainer may have to bind it
            self._notify()


def what_decides(progress: Progress | None) -> Hashable:
    """Return the part of a job's progress that affects a trainer: uid, whether the job is admitted, and whether it has ended; None: no progress."""
    return None if progress is None else (progress.uid, progress.admitted, progress.phase.final)

"""Capacities of pools and needs of jobs, by resource: agents on adapter slots, KV cache, trainer memory. Pure.

Amounts are whole units. A resource of at most `GRAIN` has units of one; a larger one is divided into `GRAIN` units, and
a need is rounded up. So sums are exact, and no pool is overcommitted by rounding.

Adapters page in the engines, so a pool admits more agents than it has slots: `agentsPerSlot` agents take turns on one
slot and on its part of the KV cache. An agent counts for one slot, although it uses up to maxStaleness + 2 versions at once.
But a job is queued only if all versions of its agents fit one engine together, and all its agents one trainer's memory
(`admission`), so that a job alone never pages.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from marlaas_api.messages import JobDocument, ReplicaReport, agents_on
from marlaas_api.numeric import trained_bytes

GRAIN = 1 << 12
SLOTS, KV_CACHE, TRAINER_MEMORY = "adapter slots", "KV cache", "trainer memory"

AGENTS_PER_PLACE = 2
"""Number of agents that a pool admits for each one that fits a trainer's memory.

The agents take turns; a parked agent needs none of this memory (`trainer.room`).
"""

Resource = tuple[str, str]
"""A pool's name, and one of `SLOTS`, `KV_CACHE` and `TRAINER_MEMORY`."""
Amounts = Mapping[Resource, int]
"""Units by resource. A resource that is absent is unknown and limits nothing."""


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Capacity of a pool, from the reports of its ready rollout replicas and trainers.

    Attributes:
        slots: adapter slots of the smallest engine.
        max_rank: largest adapter rank that every engine supports.
        max_model_len: longest conversation in tokens that every engine supports; 0 if unknown.
        agents: number of agents that the pool admits, over all engines.
        kv_tokens: tokens in the KV caches of all engines; 0 if unknown.
        shared_kv_tokens: tokens that admitted jobs may need in all: each cache's tokens times the engine's `agentsPerSlot`; 0 if unknown.
        trainer_bytes: memory of the smallest trainer for adapters, gradients, moments and KL references; 0 if unknown. Memory of several
            trainers is not added up, since any trainer may have to take all agents.
        bytes_per_rank: bytes of trainer memory that one agent without a KL reference needs for each unit of its adapter's rank; 0 if unknown.
    """

    slots: int
    max_rank: int
    max_model_len: int = 0
    agents: int = 0
    kv_tokens: int = 0
    shared_kv_tokens: int = 0
    trainer_bytes: int = 0
    bytes_per_rank: int = 0

    def totals(self) -> dict[str, int]:
        """Return the totals of the known resources, by resource name: agents on adapter slots, tokens of KV cache, bytes of trainer memory."""
        known = {
            SLOTS: self.agents,
            KV_CACHE: self.shared_kv_tokens,
            TRAINER_MEMORY: self.trainer_bytes * AGENTS_PER_PLACE,
        }
        return {name: total for name, total in known.items() if total > 0}


def capacities(reports: Iterable[ReplicaReport]) -> dict[str, PoolCapacity]:
    """Return the capacities of the pools that have a ready rollout replica, by pool name. reports: of all replicas, ready or not."""
    serving: defaultdict[str, list[ReplicaReport]] = defaultdict(list)
    trainers: defaultdict[str, list[ReplicaReport]] = defaultdict(list)
    for report in reports:
        if report.role == "rollout" and report.ready and report.slots > 0:
            serving[report.pool].append(report)
        elif report.role == "trainer" and report.ready and report.agent_room_bytes > 0:
            trainers[report.pool].append(report)
    return {pool: _capacity(found, trainers[pool]) for pool, found in serving.items()}


def unserved(document: JobDocument, reports: Iterable[ReplicaReport]) -> str:
    """Return a text that names the job's pools without a ready rollout replica, and the job's agents on them; empty if all pools have one."""
    serving = {one.pool for one in reports if one.role == "rollout" and one.ready}
    return _unready("rollout replica", document, document.pools - serving)


def trainerless(document: JobDocument, pools: Set[str], reports: Iterable[ReplicaReport]) -> str:
    """Return a text that names those of `pools` that have no ready trainer, and the job's agents on them; empty if all pools have one."""
    training = {one.pool for one in reports if one.role == "trainer" and one.ready}
    return _unready("trainer", document, pools - training)


def _unready(worker: str, document: JobDocument, missing: Set[str]) -> str:
    pools = " and of pool ".join(map(document.pool_text, sorted(missing)))
    return f"no {worker} of pool {pools} is ready" if missing else ""


def _capacity(engines: list[ReplicaReport], trainers: list[ReplicaReport]) -> PoolCapacity:
    is_kv_known = all(one.kv_tokens > 0 for one in engines)
    return PoolCapacity(
        slots=min(one.slots for one in engines),
        max_rank=min(one.max_rank for one in engines),
        max_model_len=min((one.max_model_len for one in engines if one.max_model_len > 0), default=0),
        agents=sum(one.slots * one.agents_per_slot for one in engines),
        kv_tokens=sum(one.kv_tokens for one in engines) if is_kv_known else 0,
        shared_kv_tokens=sum(one.kv_tokens * one.agents_per_slot for one in engines) if is_kv_known else 0,
        trainer_bytes=min((one.agent_room_bytes for one in trainers), default=0),
        bytes_per_rank=max((one.bytes_per_rank for one in trainers), default=0),
    )


def totals(pools: Mapping[str, PoolCapacity]) -> dict[Resource, int]:
    """Return the total units of each known resource of each pool. pools: capacities by pool name."""
    return {
        (pool, name): min(total, GRAIN) for pool, capacity in pools.items() for name, total in capacity.totals().items()
    }


def trainer_bytes(document: JobDocument, pool: str, capacity: PoolCapacity) -> int:
    """Return the bytes of trainer memory that a job's agents on a pool need; frozen agents need none."""
    agents = (one.agent for one in agents_on(pool, document) if one.agent.trainable)
    return sum(
        trained_bytes(one.adapter.rank, document.spec.num_copies(one), capacity.bytes_per_rank) for one in agents
    )


@dataclass(frozen=True, slots=True, eq=False)
class JobDemand:
    """The units of resources that a job needs.

    Attributes:
        document: the job's document.
        need: units of its pools' resources, which the job holds while it is admitted. A pool whose capacity is unknown is absent.
    """

    document: JobDocument
    need: Amounts

    @property
    def uid(self) -> str:
        """The job's uid."""
        return self.document.uid

    @property
    def tenant(self) -> str:
        """The job's tenant."""
        return self.document.tenant

    @property
    def pool(self) -> str:
        """The pool in whose queue the job waits."""
        return self.document.queue


class Demands:
    """Cache of the units that each job needs (`JobDemand`), as computed from the pools' present capacities."""

    def __init__(self) -> None:
        self._pools: Mapping[str, PoolCapacity] = {}
        self._known: dict[str, JobDemand] = {}

    def update(self, pools: Mapping[str, PoolCapacity], uids: Iterable[str]) -> None:
        """Set the pools' capacities, and drop outdated demands from the cache.

        If a capacity has changed, all demands are dropped. Otherwise, only those of the jobs `uids` are kept.

        Args:
            pools: present capacities by pool name.
        """
        before = self._known if pools == self._pools else {}
        self._pools = dict(pools)
        self._known = {uid: before[uid] for uid in uids if uid in before}

    def of(self, document: JobDocument) -> JobDemand:
        """Return the units of each resource that a job needs. They are computed again only if the job's document or a capacity has changed."""
        known = self._known.get(document.uid)
        if known is None or known.document is not document:
            known = self._known[document.uid] = JobDemand(document, _need(document, self._pools))
        return known

    def share_of(self, document: JobDocument) -> float:
        """Return a job's own dominant share: the largest fraction of any resource's total that it needs; not divided by the tenant's weight."""
        amounts = totals(self._pools)
        return max((units / amounts[resource] for resource, units in self.of(document).need.items()), default=0.0)


def _need(document: JobDocument, pools: Mapping[str, PoolCapacity]) -> dict[Resource, int]:
    found: dict[Resource, int] = {}
    for pool in document.pools:
        capacity = pools.get(pool)
        if capacity is None:
            continue
        wanted = {
            SLOTS: document.num_pinned_on(pool),
            KV_CACHE: _kv_tokens(document, capacity),
            TRAINER_MEMORY: trainer_bytes(document, pool, capacity),
        }
        for name, total in capacity.totals().items():
            found[pool, name] = -(-wanted[name] * min(total, GRAIN) // total)
    return found


def _kv_tokens(document: JobDocument, capacity: PoolCapacity) -> int:
    """Return the tokens of KV cache that a job needs: one reply of the longest length for each episode that can be played at once.

    This is an estimate: prompts are not known, and most replies are shorter. The rollout role's request limiter keeps the real use
    within the cache. A job counts for at most the whole cache, so that every job fits alone.
    """
    return min(document.spec.open_episodes * document.spec.rollout.max_tokens, capacity.kv_tokens)


class Space:
    """Free units of the pools, and the test whether a job that is admitted now can delay another one that waits.

    Args:
        amounts: total units by resource.
        holding: demands of the admitted jobs, whose units are not free.

    Attributes:
        free: free units by resource; negative if admitted jobs hold more than the pool has now.
    """

    def __init__(self, amounts: Amounts, holding: Iterable[JobDemand] = ()) -> None:
        self.free = dict(amounts)
        self._sums = dict.fromkeys(amounts, 1)
        for demand in holding:
            self.take(demand)

    def take(self, demand: JobDemand) -> None:
        """Subtract the units that an admitted job holds from the free ones."""
        for resource, units in demand.need.items():
            self.free[resource] -= units
            self._sums[resource] |= self._sums[resource] << units

    def lacks(self, demand: JobDemand) -> list[Resource]:
        """Return the resources that have too few free units for a job."""
        return [resource for resource, units in demand.need.items() if units > self.free[resource]]

    def delays(self, demand: JobDemand, first: JobDemand) -> bool:
        """Return whether `demand`, if it is admitted now, can delay `first`, which waits.

        It can if some set of running jobs, when it ends, leaves enough of a resource for `first` only if `demand` is not admitted. Every
        set counts, since run times are not known (backfilling as in EASY; Lifka, 1995). Each resource is checked by itself, so the
        result may be True although no delay is possible.
        """
        return any(
            self._delays(resource, units, first.need[resource])
            for resource, units in demand.need.items()
            if units and resource in first.need
        )

    def _delays(self, resource: Resource, units: int, wanted: int) -> bool:
        """Return whether some set of running jobs, when it ends, leaves enough units for `wanted` only if the new job is not admitted.

        That is: the set frees n units with missing <= n < missing + units, where missing = wanted - free.

        Args:
            units: units that the new job would take.
            wanted: units that the waiting job needs.
        """
        missing = wanted - self.free[resource]
        least = max(0, missing)
        width = missing + units - least
        return width > 0 and bool(self._sums[resource] >> least & ((1 << width) - 1))

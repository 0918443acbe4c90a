"""Who may run: a pure decision from the jobs and what the pools' replicas report.

A later scheduler (fairness, preemption) replaces `decide` behind the same signature. What can never fit is refused with the number;
what does not fit now is queued with the reason; nothing waits for a reason that is not told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.kinds.checks import slots_needed
from marlaas_api.messages import JobDocument, ReplicaReport


@dataclass(frozen=True, slots=True)
class Admission:
    """admitted False and refused False: queued. reason is CamelCase; message is for people."""

    admitted: bool
    reason: str
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Adapter slots of one engine of the pool, and the largest rank it takes."""

    slots: int
    max_rank: int


ADMITTED = Admission(True, "Admitted", "running")


def capacities(reports: Sequence[ReplicaReport]) -> dict[str, PoolCapacity]:
    """What each pool offers: the least of its live rollout replicas, since an episode may land on any."""
    pools: dict[str, PoolCapacity] = {}
    for report in reports:
        if report.role != "rollout" or not report.ready or report.slots == 0:
            continue
        seen = pools.get(report.pool, PoolCapacity(report.slots, report.max_rank))
        pools[report.pool] = PoolCapacity(min(seen.slots, report.slots), min(seen.max_rank, report.max_rank))
    return pools


def decide(
    candidates: Sequence[JobDocument], running: Sequence[JobDocument], pools: Mapping[str, PoolCapacity]
) -> dict[str, Admission]:
    """Decide every candidate, by uid; candidates are in the order in which they are to be served."""
    used: dict[str, int] = {}
    for document in running:
        used[document.pool] = used.get(document.pool, 0) + slots_needed(document.spec)
    verdicts: dict[str, Admission] = {}
    for document in candidates:
        pool = pools.get(document.pool)
        verdict = _one(document, pool, used.get(document.pool, 0))
        verdicts[document.uid] = verdict
        if verdict.admitted:
            used[document.pool] = used.get(document.pool, 0) + slots_needed(document.spec)
    return verdicts


def in_order(documents: Sequence[JobDocument]) -> list[JobDocument]:
    """Queue order: higher priority first, then by name."""
    return sorted(documents, key=lambda document: (-document.spec.priority, document.namespace, document.job))


def _one(document: JobDocument, pool: PoolCapacity | None, used: int) -> Admission:
    if document.spec.suspend:
        return Admission(False, "Suspended", "spec.suspend is true; set it to false to go on")
    if len(document.spec.agents) > 1 or not document.spec.agents[0].trainable:
        text = "jobs with several agents or a frozen one are not supported yet: give exactly one trainable agent"
        return Admission(False, "UnsupportedAgents", text, refused=True)
    if pool is None:
        return Admission(False, "WaitingForPool", f"no rollout replica of pool {document.pool} is ready yet")
    rank = max(agent.adapter.rank for agent in document.spec.agents)
    if rank > pool.max_rank:
        text = f"adapter rank {rank} is above the maxRank {pool.max_rank} of pool {document.pool}; lower it"
        return Admission(False, "RankTooLarge", text, refused=True)
    need = slots_needed(document.spec)
    if need > pool.slots:
        text = f"needs {need} adapter slots (maxStaleness + 2 for each agent); pool {document.pool} has {pool.slots}"
        return Admission(False, "TooManySlots", text, refused=True)
    if used + need > pool.slots:
        # No number that changes with other jobs: each of thousands of waiting jobs would have to be told anew.
        text = f"needs {need} of the {pool.slots} adapter slots of pool {document.pool}; jobs before it hold too many"
        return Admission(False, "WaitingForSlots", text)
    return ADMITTED

"""Who may run: a pure decision from the jobs and what the pools' replicas report.

Admitted is admitted: a job that holds its slots keeps them until it ends or is suspended. The others queue, pool by pool, by creation time. Nothing is
refused here: the replicas of the moment do not say what their pool will offer, so what they cannot do is waited for. What can never fit the pool's
spec is refused before a job has a document (`marlaas_operator.policies.document_publishing`, `marlaas validate`). A later scheduler (fairness, preemption)
replaces `decide` behind the same signature.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.kinds.checks import slots_needed
from marlaas_api.messages import JobDocument, ReplicaReport
from marlaas_api.reasons import Reason


@dataclass(frozen=True, slots=True)
class Admission:
    """Not admitted is queued, or suspended. reason is CamelCase; message is for people."""

    admitted: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """What every engine of the pool that serves now can do: adapter slots, largest rank, longest conversation in tokens (0: not known)."""

    slots: int
    max_rank: int
    max_model_len: int = 0


ADMITTED = Admission(True, Reason.ADMITTED, "running")


def capacities(reports: Iterable[ReplicaReport]) -> dict[str, PoolCapacity]:
    """What each pool offers: the least of its live rollout replicas, since an episode may land on any."""
    serving: defaultdict[str, list[ReplicaReport]] = defaultdict(list)
    for report in reports:
        if report.role == "rollout" and report.ready and report.slots > 0:
            serving[report.pool].append(report)
    return {
        pool: PoolCapacity(
            min(report.slots for report in found),
            min(report.max_rank for report in found),
            min((report.max_model_len for report in found if report.max_model_len > 0), default=0),
        )
        for pool, found in serving.items()
    }


def decide(
    waiting: Iterable[JobDocument], holding: Iterable[JobDocument], pools: Mapping[str, PoolCapacity]
) -> dict[str, Admission]:
    """Decide every waiting job, by uid. holding: jobs that are admitted; they count with their slots, whatever their pool offers now."""
    held: defaultdict[str, list[int]] = defaultdict(list)
    for document in holding:
        held[document.pool].append(slots_needed(document.spec))
    queues: defaultdict[str, list[JobDocument]] = defaultdict(list)
    verdicts: dict[str, Admission] = {}
    for document in waiting:
        hindrance = _hindrance(document, pools.get(document.pool))
        if hindrance is None:
            queues[document.pool].append(document)
        else:
            verdicts[document.uid] = hindrance
    for pool, documents in queues.items():
        verdicts |= _serve(queue_order(documents), held[pool], pools[pool].slots)
    return verdicts


def queue_order(documents: Iterable[JobDocument]) -> list[JobDocument]:
    """The queue of one pool: first come, first served.

    The positions are by creation time over all tenants; jobs of the same time are ordered by namespace, then name. A tenant's jobs share out its own
    positions among themselves: the highest priority takes the first of them, equal priorities stay in order of creation. So `priority` never moves
    another tenant's job.
    """
    by_creation = sorted(documents, key=_creation)
    by_priority = sorted(by_creation, key=lambda document: -document.spec.priority)
    own: defaultdict[str, list[JobDocument]] = defaultdict(list)
    for document in reversed(by_priority):
        own[document.tenant].append(document)
    return [own[document.tenant].pop() for document in by_creation]


def _creation(document: JobDocument) -> tuple[float, str, str]:
    return document.created_at, document.namespace, document.job


def _serve(queue: Sequence[JobDocument], held: Iterable[int], slots: int) -> Iterator[tuple[str, Admission]]:
    """Admit from the front. Once a job does not fit, those behind it take only slots that it could not use.

    The first job that does not fit is the next to run, and no job that passes it may make it wait longer, in whatever order the running jobs end: how
    long they run is not known. So a large job does not starve, and slots that it cannot use are not left idle (EASY backfilling; Lifka, 1995).
    """
    free, sums, first = slots, 1, 0
    for need in held:
        free, sums = free - need, sums | sums << need
    for document in queue:
        need = slots_needed(document.spec)
        if need <= free and not (first and _delays(need, first - free, sums)):
            free, sums = free - need, sums | sums << need
            yield document.uid, ADMITTED
        else:
            first = first or need
            yield document.uid, _waits_for_slots(document, slots)


def _delays(need: int, missing: int, sums: int) -> bool:
    """Whether `need` more slots in use can make a job wait longer that misses `missing` slots.

    They can if some set of running jobs, when it ends, frees enough slots without them and too few with them. sums: bit n is set if some set of
    running jobs holds n slots.
    """
    return bool(sums >> missing & ((1 << need) - 1))


def _waits_for_slots(document: JobDocument, slots: int) -> Admission:
    # No number that changes with other jobs: each of thousands of waiting jobs would have to be told anew.
    text = (
        f"needs {slots_needed(document.spec)} of the {slots} adapter slots of pool {document.pool}; running jobs hold too many of them, or a job that "
        "was created earlier waits for them"
    )
    return Admission(False, Reason.WAITING_FOR_SLOTS, text)


def _hindrance(document: JobDocument, pool: PoolCapacity | None) -> Admission | None:
    """Why a job does not even queue for slots now; None if it does. A job that could not run has no position that another could take."""
    if document.spec.suspend:
        return Admission(False, Reason.SUSPENDED, "spec.suspend is true; set it to false to go on")
    if len(document.spec.agents) > 1 or not document.spec.agents[0].trainable:
        text = "this orchestrator trains exactly one agent of a job; it begins when the installation is upgraded"
        return Admission(False, Reason.UNSUPPORTED_AGENTS, text)
    if pool is None:
        return Admission(False, Reason.WAITING_FOR_POOL, f"no rollout replica of pool {document.pool} is ready yet")
    lacking = _lacking(document, pool)
    if lacking is None:
        return None
    text = f"{lacking} in a replica of pool {document.pool} that serves now; it begins when every replica has enough"
    return Admission(False, Reason.WAITING_FOR_POOL, text)


def _lacking(document: JobDocument, pool: PoolCapacity) -> str | None:
    """What the replicas that serve now cannot do, with both numbers."""
    rank, need = max(agent.adapter.rank for agent in document.spec.agents), slots_needed(document.spec)
    tokens = document.spec.rollout.max_tokens
    if rank > pool.max_rank:
        return f"has adapter rank {rank}, and maxRank is {pool.max_rank}"
    if need > pool.slots:
        return f"needs {need} adapter slots (maxStaleness + 2 for each agent), and there are {pool.slots}"
    if 0 < pool.max_model_len <= tokens:
        return f"has maxTokens {tokens}, and maxModelLen is {pool.max_model_len}"
    return None

"""Admission: a pure decision from the jobs and the reports of the pools' replicas.

An admitted job keeps its slots until it ends or is suspended. The others queue by pool and creation time.
Nothing is refused here: the current replicas do not show what their pool will offer later, so a job that does
not fit waits. A job that can never fit the pool's spec is refused earlier
(`marlaas_operator.policies.job_phase`, `marlaas validate`). A scheduler with fairness or preemption
can replace `decide` behind the same signature.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.messages import JobDocument, ReplicaReport
from marlaas_api.reasons import Reason


@dataclass(frozen=True, slots=True)
class Admission:
    """An admission decision. A job that is not admitted is queued or suspended. reason: CamelCase; message: for people."""

    admitted: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Adapter slots, largest rank and longest conversation that every serving engine of a pool supports.

    max_model_len: in tokens; 0 if not known.
    """

    slots: int
    max_rank: int
    max_model_len: int = 0


ADMITTED = Admission(True, Reason.ADMITTED, "running")


def capacities(reports: Iterable[ReplicaReport]) -> dict[str, PoolCapacity]:
    """Return each pool's capacity: the minimum over its ready rollout replicas, since an episode may run on any of them."""
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
    """Decide on every waiting job; return the decisions by uid.

    Args:
        holding: admitted jobs; their slots count, whatever their pool offers now.
    """
    held: defaultdict[str, list[int]] = defaultdict(list)
    for document in holding:
        held[document.pool].append(document.spec.slots_needed)
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


class PublishedAdmissions:
    """The last decision published for each waiting job, so that an unchanged decision is not written again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JobDocument, Admission]] = {}

    def missing(
        self, waiting: Iterable[JobDocument], admissions: Mapping[str, Admission]
    ) -> list[tuple[JobDocument, Admission]]:
        """Return the decisions on jobs that stay waiting which are not published, or only for an earlier document."""
        decided = ((document, admissions[document.uid]) for document in waiting)
        return [one for one in decided if not one[1].admitted and not self._is_published(*one)]

    def note(self, published: Iterable[tuple[JobDocument, Admission]]) -> None:
        """Note published decisions."""
        self._known |= {document.uid: (document, admission) for document, admission in published}

    def keep(self, uids: Container[str]) -> None:
        """Remove all other jobs."""
        self._known = {uid: known for uid, known in self._known.items() if uid in uids}

    def forget(self, uid: str) -> None:
        """Remove a job, which no longer waits."""
        self._known.pop(uid, None)

    def _is_published(self, document: JobDocument, admission: Admission) -> bool:
        known = self._known.get(document.uid)
        return known is not None and known[0] is document and known[1] == admission


def queue_order(documents: Iterable[JobDocument]) -> list[JobDocument]:
    """Return the queue order of one pool: first come, first served, with priorities within a tenant.

    Positions follow the creation time over all tenants; jobs of the same time are ordered by namespace, then
    name. A tenant's jobs share the tenant's own positions: the highest priority takes the first of them, and
    equal priorities stay in order of creation. So `priority` never moves another tenant's job.
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
    """Admit jobs from the front of the queue; yield a decision for each job.

    After the first job that does not fit, a later job is admitted only if it cannot delay that first job. This
    holds for every order in which the running jobs may end, since their run times are not known. So a large job
    does not starve, and slots that it cannot use are not idle (EASY backfilling; Lifka, 1995).
    """
    free, sums, first = slots, 1, 0
    for need in held:
        free, sums = free - need, sums | sums << need
    for document in queue:
        need = document.spec.slots_needed
        if need <= free and not (first and _delays(need, first - free, sums)):
            free, sums = free - need, sums | sums << need
            yield document.uid, ADMITTED
        else:
            first = first or need
            yield document.uid, _waits_for_slots(document, slots)


def _delays(need: int, missing: int, sums: int) -> bool:
    """Return whether `need` more slots in use can delay a job that lacks `missing` slots.

    They can if the end of some set of running jobs frees enough slots without them, and too few with them.
    sums: bit n is set if some set of running jobs holds n slots.
    """
    return bool(sums >> missing & ((1 << need) - 1))


def _waits_for_slots(document: JobDocument, slots: int) -> Admission:
    # No number that changes with other jobs: each change would rewrite the progress of thousands of waiting jobs.
    text = (
        f"needs {document.spec.slots_needed} of the {slots} adapter slots of pool {document.pool}; running jobs hold too many of them, or a job that "
        "was created earlier waits for them"
    )
    return Admission(False, Reason.WAITING_FOR_SLOTS, text)


def _hindrance(document: JobDocument, pool: PoolCapacity | None) -> Admission | None:
    """Return why a job does not queue for slots now; None if it does.

    A job that could not run takes no position in the queue.
    """
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
    """Return which need of the job the serving replicas do not meet, with both numbers; None if they meet all."""
    rank, need = max(agent.adapter.rank for agent in document.spec.agents), document.spec.slots_needed
    tokens = document.spec.rollout.max_tokens
    if rank > pool.max_rank:
        return f"has adapter rank {rank}, and maxRank is {pool.max_rank}"
    if need > pool.slots:
        return f"needs {need} adapter slots (maxStaleness + 2 for each agent), and there are {pool.slots}"
    if 0 < pool.max_model_len <= tokens:
        return f"has maxTokens {tokens}, and maxModelLen is {pool.max_model_len}"
    return None

"""Admission. Decides on the jobs that start now, the reasons for which other jobs wait, and the running jobs to preempt. No I/O.

An admitted job stays admitted until it ends, is suspended, or is preempted (`preemption`); edits of the job, restarts of the
orchestrator and new jobs do not change that. No job is refused here: the current replicas do not show what their pool will offer
later, so a job that does not fit waits. A job that can never fit the pool's spec is refused earlier
(`marlaas_operator.policies.job_phase`, `marlaas validate`).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_

from marlaas_api.messages import JobDocument, Progress, TenantQuota, agents_on
from marlaas_api.names import JobRef
from marlaas_api.numeric import slots_needed
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator.capacity import (
    KV_CACHE,
    SLOTS,
    Demands,
    JobDemand,
    PoolCapacity,
    Resource,
    Space,
    totals,
    trainer_bytes,
)
from marlaas_worker.orchestrator.fair_order import FairOrder, Holdings, PastUse
from marlaas_worker.orchestrator.preemption import RunningJob, preemptions
from marlaas_worker.orchestrator.quota import QuotaMessages, Quotas

RECONSIDER_S = 5.0
"""Seconds for which a decision is reused while the scene does not change. Then it is recomputed: past use decays, and minimum run times end."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision on one waiting job.

    Attributes:
        admitted: whether the job starts now. If not, it stays queued, held or suspended.
        reason: why, as a value of `Reason`.
        message: the reason in a sentence for people.
    """

    admitted: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """A tenant's weight and quota.

    Attributes:
        weight: a tenant with weight 2 is entitled to twice as much as one with weight 1. For the order of admissions, the tenant's share of
            the pools and its past use are divided by the weight.
        quota: the tenant's limits; none by default.
    """

    weight: float = 1.0
    quota: TenantQuota = field(default_factory=TenantQuota)


@dataclass(frozen=True, slots=True)
class AdmissionScene:
    """Everything that one decision on admissions and preemptions depends on, besides earlier decisions.

    Attributes:
        waiting: documents of jobs that are not admitted.
        holding: documents of admitted jobs. The units of resources that a job needs count as held, even if its pool has fewer now.
        since: when each of `holding` was last admitted, in the same order, unix seconds.
        pools: capacities, by name, of the pools that have a ready rollout replica.
        tenants: terms by tenant; a tenant that is absent has weight 1 and no quota.
        stored: by tenant, bytes that its jobs keep in the blob store.
        now: unix seconds.
        progress_of: returns a job's published progress; None before the first.
    """

    waiting: list[JobDocument]
    holding: list[JobDocument]
    since: list[float]
    pools: Mapping[str, PoolCapacity]
    tenants: Mapping[str, TenantTerms] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0
    progress_of: Callable[[JobRef], Progress | None] = lambda _: None

    def stands_for(self, other: "AdmissionScene") -> bool:
        """Return whether the decision on this scene holds for another: less than RECONSIDER_S later, with the same jobs, pools and tenants."""
        return (
            0 <= other.now - self.now < RECONSIDER_S
            and len(self.waiting) == len(other.waiting)
            and len(self.holding) == len(other.holding)
            and all(map(is_, self.waiting, other.waiting))
            and all(map(is_, self.holding, other.holding))
            and (self.pools, self.tenants, self.stored) == (other.pools, other.tenants, other.stored)
        )


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The waiting jobs that are admitted, and the running jobs that must stop to make room.

    Attributes:
        admissions: the decision on each waiting job, by uid.
        preempted: by uid of each running job that must stop, why it is preempted, as text for people.
    """

    admissions: dict[str, Admission] = field(default_factory=dict)
    preempted: dict[str, str] = field(default_factory=dict)


ADMITTED = Admission(True, Reason.ADMITTED, "running")


class AdmissionQueue:
    """Decides which waiting jobs are admitted and which running jobs are preempted.

    Between decisions, it keeps the tenants' past use, and the preemptions in progress: those for which running jobs still have to stop.
    """

    def __init__(self) -> None:
        self.past = PastUse()
        self._demands = Demands()
        self._messages = QuotaMessages()
        self._victims: dict[str, dict[str, str]] = {}
        self._shares: dict[str, float] = {}
        self._last: tuple[AdmissionScene, AdmissionDecision] | None = None

    def decide(self, scene: AdmissionScene) -> AdmissionDecision:
        """Decide for every waiting job whether it is admitted now, or why it waits, and which running jobs must stop.

        No job is started or stopped here: the caller carries out the decision. While the last decision holds (`AdmissionScene.stands_for`), it
        is returned again.
        """
        if self._last is not None and self._last[0].stands_for(scene):
            return self._last[1]
        decision, queued = AdmissionDecision(), list[JobDocument]()
        for document in scene.waiting:
            hindrance = _hindrance(document, scene.pools)
            if hindrance is None:
                queued.append(document)
            else:
                decision.admissions[document.uid] = hindrance
        if queued or scene.holding:
            self._decide_on_queue(scene, queued, decision)
        else:
            self._shares = {}
        self._last = scene, decision
        return decision

    def advance(self, now: float) -> None:
        """Add to each tenant's past use what its jobs used since the last call, by their share as of the last decision. now: unix seconds."""
        self.past.advance(now, self._shares)

    def entered(self, document: JobDocument) -> None:
        """Add the charge for a job's admission, `fair_order.ENTRY_S` seconds of the job's share, to its tenant's past use."""
        self.past.enter(document.tenant, self._demands.share_of(document))

    def left(self, document: JobDocument) -> None:
        """Refund the charge for the admission of a job that was preempted: its next admission is charged again."""
        self.past.refund(document.tenant, self._demands.share_of(document))

    def _decide_on_queue(self, scene: AdmissionScene, queued: list[JobDocument], decision: AdmissionDecision) -> None:
        self._demands.update(scene.pools, [document.uid for document in (*scene.holding, *queued)])
        amounts = totals(scene.pools)
        running = [
            RunningJob(self._demands.of(one), since) for one, since in zip(scene.holding, scene.since, strict=True)
        ]
        held = [one.demand for one in running]
        weights = {name: terms.weight for name, terms in scene.tenants.items()}
        limited = {name: terms.quota for name, terms in scene.tenants.items() if terms.quota != TenantQuota()}
        quotas = Quotas(limited, scene.holding, scene.stored)

        def admit(demand: JobDemand) -> None:
            quotas.add(demand.document)
            decision.admissions[demand.uid] = ADMITTED

        order = FairOrder(
            Space(amounts, held),
            Holdings(amounts, weights, held),
            self.past,
            lambda tenant: weights.get(tenant, 1.0),
            lambda demand: bool(quotas.refusal(demand.document)),
            admit,
        )
        waiting = {document.uid: self._demands.of(document) for document in queued}
        reserved = self._resume_preemptions(waiting, {one.demand.uid for one in running}, order)
        order.run(one for uid, one in waiting.items() if uid not in reserved and uid not in decision.admissions)
        self._preempt(order, running, scene.now)
        decision.preempted.update({uid: text for victims in self._victims.values() for uid, text in victims.items()})
        stays = [one for one in held if one.uid not in decision.preempted]
        counted = Holdings(amounts, weights, stays)
        self._shares = {tenant: counted.dominant(tenant) for tenant in counted.tenants()}
        self._explain(scene, queued, quotas, decision, order)

    def _resume_preemptions(
        self, waiting: Mapping[str, JobDemand], running: Container[str], order: FairOrder
    ) -> set[str]:
        """Continue the preemptions in progress; return the uids of the jobs for which units are reserved.

        The preemptor is the waiting job; its victims are the running jobs that must stop for it. While any victim runs, the preemptor's
        units are reserved. Once all victims have stopped, the preemptor is admitted. This does not check the pool's free units again, even
        if the pool has become smaller: the victims have freed what the preemptor needs. A preemption is cancelled, and its victims keep
        running, if the preemptor no longer waits or is over its quota.

        Args:
            waiting: demands of queued jobs, by uid.
            running: uids of admitted jobs.
            order: the round of admissions, in which the units are reserved and the preemptors admitted.
        """
        reserved = set()
        pending, self._victims = self._victims, {}
        for uid, victims in pending.items():
            demand, left = waiting.get(uid), {one: text for one, text in victims.items() if one in running}
            if demand is None or order.is_over_quota(demand):
                continue
            if left:
                self._victims[uid] = left
                reserved.add(uid)
                order.reserve(demand)
            else:
                order.admit(demand)
        return reserved

    def _preempt(self, order: FairOrder, running: Iterable[RunningJob], now: float) -> None:
        busy = {uid for victims in self._victims.values() for uid in victims}
        for found in preemptions(order, [one for one in running if one.demand.uid not in busy], now):
            tenant, job = found.preemptor.tenant, found.preemptor.document
            text = f"preempted by tenant {tenant} ({job.namespace}/{job.job}), whose share is smaller; it resumes where it stopped when there is room"
            self._victims[found.preemptor.uid] = {victim.uid: text for victim in found.victims}

    def _explain(
        self,
        scene: AdmissionScene,
        queued: Iterable[JobDocument],
        quotas: Quotas,
        decision: AdmissionDecision,
        order: FairOrder,
    ) -> None:
        """Add to `decision` why each queued job that is not admitted waits."""
        running = {document.uid: document.ref for document in scene.holding}
        self._messages.begin()
        for document in sorted(queued, key=lambda one: (-one.spec.priority, one.created_at)):
            if document.uid in decision.admissions:
                continue
            refusal = quotas.refusal(document)
            before = scene.progress_of(document.ref)
            if refusal:
                others = {
                    uid: scene.progress_of(running[uid]) for uid in quotas.running(document.tenant) if uid in running
                }
                text = self._messages.message(document, refusal, others, scene.now)
                verdict = Admission(False, Reason.OVER_QUOTA, text)
            elif before is not None and before.reason == Reason.PREEMPTED and not before.admitted:
                verdict = Admission(False, Reason.PREEMPTED, before.message)
            else:
                verdict = _waits_for(document, order.space.lacks(self._demands.of(document)), scene.pools)
            decision.admissions[document.uid] = verdict


def _waits_for(document: JobDocument, lacking: list[Resource], pools: Mapping[str, PoolCapacity]) -> Admission:
    # The texts contain no number that depends on other jobs: each change would rewrite the progress of thousands of waiting jobs.
    if lacking and all(name != SLOTS for _, name in lacking):
        pool, name = lacking[0]
        advice = " (kvCacheBytes)" if name == KV_CACHE else ""
        text = f"running jobs use too much of the {name} of pool {document.pool_text(pool)}{advice}"
        return Admission(False, Reason.WAITING_FOR_MEMORY, text)
    pool = lacking[0][0] if lacking else document.queue
    text = (
        f"pool {document.pool_text(pool)} admits {pools[pool].agents} agents at once; running jobs have too many of them, or a job that goes first waits for "
        "them"
    )
    return Admission(False, Reason.WAITING_FOR_SLOTS, text)


def _hindrance(document: JobDocument, pools: Mapping[str, PoolCapacity]) -> Admission | None:
    """Return why a waiting job is kept out of the queue for its pools now; None if it is queued.

    A job in the queue can hold up others, so a job that could not run takes no position in it.
    """
    if document.spec.suspend:
        return Admission(False, Reason.SUSPENDED, "spec.suspend is true; set it to false to go on")
    if document.hold is not None and document.is_held:
        return Admission(False, document.hold.reason, document.hold.message)
    for name in sorted(document.pools):
        if name not in pools:
            return Admission(
                False, Reason.WAITING_FOR_POOL, f"no rollout replica of pool {document.pool_text(name)} is ready yet"
            )
        if lacking := _lacking(document, name, pools[name]):
            text = f"{lacking} in a replica of pool {document.pool_text(name)} that serves now; it begins when every replica has enough"
            return Admission(False, Reason.WAITING_FOR_POOL, text)
    return None


def _lacking(document: JobDocument, name: str, pool: PoolCapacity) -> str | None:
    """Return the first need of a job that the replicas of a pool do not meet; None if they meet all.

    It is a text that contains the number that the job needs and the number that the replicas offer.

    Args:
        name: the pool's name.
    """
    agents = [one.agent for one in agents_on(name, document)]
    rank, need = (
        max(agent.adapter.rank for agent in agents),
        slots_needed(document.num_pinned_on(name), document.spec.training.max_staleness),
    )
    tokens = document.spec.rollout.max_tokens
    if rank > pool.max_rank:
        return f"has adapter rank {rank}, and maxRank is {pool.max_rank}"
    if need > pool.slots:
        return f"needs {need} adapter slots (maxStaleness + 2 for each agent), and there are {pool.slots}"
    if 0 < pool.max_model_len <= tokens:
        return f"has maxTokens {tokens}, and maxModelLen is {pool.max_model_len}"
    memory = trainer_bytes(document, name, pool)
    if 0 < pool.trainer_bytes < memory:
        return f"needs {memory >> 20} MiB of trainer memory for its adapters and their optimizer, and {pool.trainer_bytes >> 20} MiB are there"
    return None


def terms_of(documents: Iterable[tuple[int, JobDocument]]) -> dict[str, TenantTerms]:
    """Return weight and quota by tenant.

    Each job's document contains the terms of its tenant. After an edit of a tenant, the operator rewrites these documents one by one, so for
    a while they differ. The document with the highest revision counts.

    Args:
        documents: all job documents, with their revisions in the bucket `jobs`.
    """
    newest: dict[str, tuple[int, JobDocument]] = {}
    for revision, document in documents:
        known = newest.get(document.tenant)
        if known is None or known[0] < revision:
            newest[document.tenant] = revision, document
    return {name: TenantTerms(one.tenant_weight, one.tenant_quota) for name, (_, one) in newest.items()}


def stored_bytes(documents: Iterable[JobDocument], progress: Mapping[str, Progress]) -> dict[str, int]:
    """Return, by tenant, the bytes that its jobs keep in the blob store. A tenant whose jobs keep none is absent.

    Args:
        documents: of all jobs.
        progress: the jobs' published progress, by uid.
    """
    total: Counter[str] = Counter()
    for document in documents:
        known = progress.get(document.uid)
        if known is not None and known.stored_bytes:
            total[document.tenant] += known.stored_bytes
    return dict(total)

"""Sentences of `marlaas why` about a job's pool: ready workers, the reason why a role is not ready, since when, and the time left. Pure."""

from collections.abc import Iterator

from marlaas.cluster.views import ClusterJobView, ClusterPoolView, condition, seconds
from marlaas.local.table import duration, sentence
from marlaas_api.kinds.status import Condition
from marlaas_api.reason_texts import ReasonStage, text_of
from marlaas_api.reasons import Reason

_STARTING = (Reason.ROLLOUT_STARTING, Reason.TRAINER_STARTING)
_CAUSES = {
    Reason.WAITING_FOR_POOL: "RolloutReady",
    Reason.WAITING_FOR_TRAINER: "TrainerReady",
    Reason.ROLLOUT_STARTING: "RolloutReady",
    Reason.TRAINER_STARTING: "TrainerReady",
}
"""Reasons that are caused by a condition of the pool."""


def cause_of(job: ClusterJobView, pool: ClusterPoolView) -> Condition | None:
    """Return the false condition of a pool that explains the job's reason; None if there is none."""
    reason = job.status.reason if job.status is not None else None
    kind = next((kind for caused, kind in _CAUSES.items() if caused == reason), None)
    found = condition(pool.status, kind) if kind is not None else None
    return found if found is not None and found.status != "True" else None


def readiness(job: ClusterJobView, pool: ClusterPoolView, cause: Condition | None, now: float) -> Iterator[str]:
    """Yield sentences about a pool's readiness, if the job's state depends on it."""
    if not _depends_on_pool(job):
        return
    status = pool.status
    engines = status.rollout.ready if status is not None and status.rollout is not None else 0
    trainers = status.trainer.ready if status is not None and status.trainer is not None else 0
    taken = (
        ""
        if status is None or status.free_slots is None
        else f", and admits {status.free_slots} more of {pool.places} agents"
    )
    ready = f"{engines or 0} of {pool.engines} engines and {trainers or 0} of {pool.trainers} trainers ready{taken}"
    yield f"Pool {pool.name} has {ready}."
    if cause is None:
        return
    if job.status is None or cause.reason != job.status.reason:
        text = text_of(cause.reason)
        message = f" Message: {sentence(cause.message)}" if cause.message.strip() else ""
        yield f"The pool is not ready because of {cause.reason}{f': {text.meaning}' if text is not None else '.'}{message}"
    yield from _expected_start(cause, pool, now)


def _depends_on_pool(job: ClusterJobView) -> bool:
    if job.status is None or job.status.phase in ("Succeeded", "Failed", "Suspended"):
        return False
    text = text_of(job.status.reason or "")
    for_pool = (Reason.WAITING_FOR_TRAINER, Reason.WAITING_FOR_ORCHESTRATOR)
    return text is not None and (
        text.stage in (ReasonStage.WAITING, ReasonStage.FAULTY) or job.status.reason in for_pool
    )


def _expected_start(cause: Condition, pool: ClusterPoolView, now: float) -> Iterator[str]:
    """Yield for how long a role of a pool has not been ready, and how much longer, if its last start took longer.

    A fault has no end that could be expected: it has to be corrected first.
    """
    since = seconds(cause.last_transition_time)
    if since is None:
        return
    waited_s, last_s = max(0.0, now - since), _last_start_s(cause, pool)
    text = f"It has not been ready for {duration(waited_s)}"
    if last_s is not None:
        left = f", so about {duration(last_s - waited_s)} are left" if last_s > waited_s else ""
        text = f"{text}; its last start took {duration(last_s)}{left}"
    yield f"{text}."


def _last_start_s(cause: Condition, pool: ClusterPoolView) -> float | None:
    """Return the seconds that the last start of a role took; None if it does not start now, or none was measured."""
    if pool.status is None or cause.reason not in _STARTING:
        return None
    workers = pool.status.rollout if cause.type == "RolloutReady" else pool.status.trainer
    return workers.start_seconds if workers is not None else None

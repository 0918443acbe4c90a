"""When a queued job can expect room: from the pace of running jobs, and the places that they would free. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas.cluster.views import WAITING_FOR_ROOM, ClusterJobView, seconds
from marlaas.local.table import duration
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.reasons import Reason


@dataclass(frozen=True, slots=True)
class JobsBeside:
    """Jobs of the same pools or the same tenant, as far as the user may read them. running: admitted. waiting: queued."""

    running: Sequence[ClusterJobView] = ()
    waiting: Sequence[ClusterJobView] = ()


def expected_room(job: ClusterJobView, beside: JobsBeside, free: Mapping[str, int] | None, now: float) -> Iterator[str]:
    """Yield sentences about the running jobs for whose end a queued job waits; nothing if it waits for something else.

    Args:
        free: by pool of the job, the number of agents that it admits beside those of running jobs; None if it is not known.
        now: unix seconds.
    """
    if job.status is None or job.status.phase != "Queued":
        return
    if job.status.reason == Reason.OVER_QUOTA and _waits_for_jobs(job.status):
        yield from _room_of_tenant(job, beside, now)
    elif job.status.reason in WAITING_FOR_ROOM:
        yield from _room_of_pools(job, beside, free, now)


def left_s(status: RLJobStatus, now: float) -> float | None:
    """Return the seconds until a running job ends at its mean time per step; None before its first step.

    Only time for which it was admitted counts, without that in a queue.
    """
    if not status.step or not status.steps:
        return None
    admitted_s = status.usage.admitted_seconds if status.usage is not None else None
    if admitted_s is None:
        began = seconds(status.started_at)
        if began is None:
            return None
        admitted_s = now - began
    return admitted_s / status.step * max(0, status.steps - status.step)


def _waits_for_jobs(status: RLJobStatus) -> bool:
    """Return whether the end of a job lifts the limit; stored bytes stay until jobs are deleted."""
    return "stored" not in (status.message or "").partition(";")[0]


def _room_of_tenant(job: ClusterJobView, beside: JobsBeside, now: float) -> Iterator[str]:
    running = [one for one in beside.running if one.tenant == job.tenant]
    ends = _ends(running, now)
    yield from _next_end(ends, len(running), f" of tenant {job.tenant}")
    ahead = [one for one in beside.waiting if one.tenant == job.tenant and _rank(one) < _rank(job)]
    if ahead:
        after = ends[len(ahead) : len(ahead) + 1]
        when = f"; its own turn then comes in about {duration(after[0][0])}" if after else ""
        yield f"{len(ahead)} waiting {'job goes' if len(ahead) == 1 else 'jobs go'} first{when}."


def _room_of_pools(
    job: ClusterJobView, beside: JobsBeside, free: Mapping[str, int] | None, now: float
) -> Iterator[str]:
    running = [one for one in beside.running if one.pools_in_common(job)]
    ends = _ends(running, now)
    yield from _next_end(ends, len(running))
    number = _num_to_end(job, [one for _, one in ends], free)
    if number is not None and number > 1:
        need = sum(job.places.values())
        agents = f"its {need} agents have" if need > 1 else "its agent has"
        yield f"If no other job goes first, {agents} room once {number} of them have ended, in about {duration(ends[number - 1][0])}."
    others = sum(1 for one in beside.waiting if one.pools_in_common(job) and one.key != job.key)
    if others:
        yield f"{others} other {'job waits' if others == 1 else 'jobs wait'} for the same pool."


def _ends(running: Sequence[ClusterJobView], now: float) -> list[tuple[float, ClusterJobView]]:
    """Return the jobs whose pace is known with the seconds until their end, the next one first."""
    known = [(left, one) for one in running if one.status is not None and (left := left_s(one.status, now)) is not None]
    return sorted(known, key=lambda pair: (pair[0], pair[1].key))


def _next_end(ends: Sequence[tuple[float, ClusterJobView]], num_running: int, whose: str = "") -> Iterator[str]:
    if ends:
        left, first = ends[0]
        of = f" of {len(ends)}" if len(ends) > 1 else ""
        yield f"At its pace so far, the next running job{of}{whose} to end is {first.key}, in about {duration(left)}."
    elif num_running:
        yield f"No running job{whose} has finished a step yet, so it is not known when one ends."


def _rank(job: ClusterJobView) -> tuple[float, float, str]:
    """Return the job's order among the waiting jobs of its tenant."""
    return (-job.priority, job.created_at, job.key)


def _num_to_end(job: ClusterJobView, ending: Sequence[ClusterJobView], free: Mapping[str, int] | None) -> int | None:
    """Return how many jobs, in the order of their ends, have to end until every pool has places for the job's agents.

    None: all of them do not free enough, the free places are not known, or they are not what the job waits for.
    """
    if not free or job.status is None or job.status.reason != Reason.WAITING_FOR_SLOTS:
        return None
    places = Counter(free)
    for number, one in enumerate(ending, start=1):
        places.update(one.places)
        if all(places[name] >= need for name, need in job.places.items()):
            return number
    return None

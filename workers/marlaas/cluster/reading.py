"""Reads what `marlaas why` explains a job with: its pool, its events, and the jobs that run beside it."""

from marlaas.cluster.errors import AccessDenied, ObjectMissing
from marlaas.cluster.explain import WAITING_FOR_ROOM
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.views import ClusterEventView, ClusterJobView, ClusterPoolView, event_view, job_view, pool_view

RLJOBS, MODELPOOLS = "rljobs.marlaas.dev", "modelpools.marlaas.dev"


def pool_of(kubectl: Kubectl, job: ClusterJobView) -> ClusterPoolView | None:
    """Return the job's pool; None if it is missing or the user may not read it."""
    try:
        return pool_view(kubectl.get(MODELPOOLS, job.pool))
    except (ObjectMissing, AccessDenied):
        return None


def events_of(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterEventView]:
    """Return the job's events; none if the user may not read them."""
    try:
        found = kubectl.list("events", f"--field-selector=involvedObject.uid={job.uid}")
    except AccessDenied:
        return []
    return [event_view(body) for body in found]


def running_beside(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterJobView]:
    """Return the running jobs of the pool for whose end the job waits, as far as the user may read them."""
    if job.status is None or job.status.reason not in WAITING_FOR_ROOM:
        return []
    try:
        found = kubectl.list(RLJOBS, "--all-namespaces")
    except AccessDenied:
        found = kubectl.list(RLJOBS)
    views = [job_view(body) for body in found]
    return [one for one in views if one.pool == job.pool and one.status is not None and one.status.phase == "Running"]

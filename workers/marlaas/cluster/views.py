"""Jobs, pools and events of a cluster: values parsed from the API server's JSON, and reading what `marlaas why` explains a job with.

Unknown fields of a newer operator are accepted.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from marlaas.cluster.errors import AccessDenied, ObjectMissing
from marlaas.cluster.kubectl import Kubectl
from marlaas_api.kinds.status import Condition, ModelPoolStatus, ObjectStatus, RLJobStatus
from marlaas_api.names import DEFAULT_TENANT
from marlaas_api.reasons import Reason

RLJOBS, MODELPOOLS = "rljobs.marlaas.dev", "modelpools.marlaas.dev"
WARNING = "Warning"
WAITING_FOR_ROOM = (Reason.WAITING_FOR_SLOTS, Reason.WAITING_FOR_MEMORY, Reason.PREEMPTED)
"""Reasons of jobs that wait until running jobs end."""


@dataclass(frozen=True, slots=True)
class ClusterJobView:
    """One RLJob. Times are unix seconds. `pools` are those on which its agents run.

    `status` is None until the operator sets one. `deleted_at` is the time when deletion was requested; None if it
    was not. `policies`: by agent that plays a policy of its own, whether it is trained. `places`: by pool, the agents for
    which it needs places. `waits_since`: time since which a running job has its reason to wait; None if it is not known.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    pools: tuple[str, ...]
    created_at: float
    deleted_at: float | None = None
    status: RLJobStatus | None = None
    backoff_limit: int = 0
    policies: Mapping[str, bool] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    priority: int = 0
    waits_since: float | None = None

    @property
    def key(self) -> str:
        """Name as `<namespace>/<name>`."""
        return f"{self.namespace}/{self.name}"

    @property
    def tenant(self) -> str:
        """Tenant to which it is accounted. Until the status names one, the default tenant."""
        return (self.status.tenant if self.status is not None else None) or DEFAULT_TENANT

    def pools_in_common(self, other: "ClusterJobView") -> set[str]:
        """Return the pools on which agents of both jobs run."""
        return {*self.pools} & {*other.pools}


@dataclass(frozen=True, slots=True)
class ClusterPoolView:
    """One ModelPool. `engines` and `trainers` are the desired replicas; `places` is the number of agents that the pool admits."""

    name: str
    engines: int
    trainers: int
    places: int
    status: ModelPoolStatus | None = None


@dataclass(frozen=True, slots=True)
class ClusterEventView:
    """One Kubernetes event. `at` is when it was last seen, in unix seconds."""

    kind: str
    reason: str
    message: str
    at: float


def job_view(body: Mapping[str, Any]) -> ClusterJobView:
    """Parse an RLJob."""
    meta, status = body["metadata"], body.get("status") or {}
    return ClusterJobView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 1),
        pools=_pools(body["spec"]),
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        deleted_at=seconds(meta.get("deletionTimestamp")),
        status=RLJobStatus.model_validate(status) if status else None,
        backoff_limit=body["spec"].get("backoffLimit", 0),
        policies=_policies(body["spec"]),
        places=_places(body["spec"]),
        priority=body["spec"].get("priority", 0),
    )


def _places(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return by pool the agents that need adapter slots: each policy, and each player of past versions."""
    agents = spec.get("agents") or [{"name": "policy"}]
    pool = {agent["name"]: (agent.get("poolRef") or spec["poolRef"])["name"] for agent in agents}
    pinned = [agent for agent in agents if agent.get("policy", {"versions": "past"}).get("versions") == "past"]
    return Counter(pool[agent.get("policy", {}).get("of", agent["name"])] for agent in pinned)


def _policies(spec: Mapping[str, Any]) -> dict[str, bool]:
    """Return the agents of a job's spec that have a policy of their own, each with whether it is trained."""
    agents = spec.get("agents") or [{"name": "policy"}]
    return {agent["name"]: agent.get("trainable", True) for agent in agents if "policy" not in agent}


def _pools(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the pools on which the agents of a job's spec run."""
    agents = [agent for agent in spec.get("agents") or [{}] if "policy" not in agent]
    return tuple(dict.fromkeys((agent.get("poolRef") or spec["poolRef"])["name"] for agent in agents))


def pool_view(body: Mapping[str, Any]) -> ClusterPoolView:
    """Parse a ModelPool."""
    spec, status = body["spec"], body.get("status") or {}
    rollout = spec.get("rollout", {})
    return ClusterPoolView(
        name=body["metadata"]["name"],
        engines=rollout.get("replicas", 1),
        trainers=spec.get("trainer", {}).get("replicas", 1),
        places=spec.get("adapterSlots", 0) * rollout.get("replicas", 1) * rollout.get("agentsPerSlot", 1),
        status=ModelPoolStatus.model_validate(status) if status else None,
    )


def event_view(body: Mapping[str, Any]) -> ClusterEventView:
    """Parse an Event of core/v1."""
    series = body.get("series") or {}
    times = (series.get("lastObservedTime"), body.get("lastTimestamp"), body.get("eventTime"))
    last = next((time for time in times if time), body["metadata"].get("creationTimestamp"))
    return ClusterEventView(
        body.get("type", ""), body.get("reason", ""), (body.get("message") or "").strip(), seconds(last) or 0.0
    )


def condition(status: ObjectStatus | None, name: str) -> Condition | None:
    """Return the condition of this type; None if there is none."""
    return next((one for one in status.conditions if one.type == name), None) if status is not None else None


def seconds(text: str | None) -> float | None:
    """Convert an RFC 3339 time to unix seconds; None for None or an empty text."""
    return None if not text else datetime.fromisoformat(text).timestamp()


def pools_of(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterPoolView]:
    """Return the job's pools; without those that are missing or that the user may not read."""
    found = []
    for name in job.pools:
        with contextlib.suppress(ObjectMissing, AccessDenied):
            found.append(pool_view(kubectl.get(MODELPOOLS, name)))
    return found


def events_of(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterEventView]:
    """Return the job's events; none if the user may not read them."""
    try:
        found = kubectl.list("events", f"--field-selector=involvedObject.uid={job.uid}")
    except AccessDenied:
        return []
    return [event_view(body) for body in found]


def jobs_beside(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterJobView]:
    """Return the other jobs of the job's pools and tenant, if it waits for their end, as far as the user may read them."""
    if job.status is None or job.status.reason not in (*WAITING_FOR_ROOM, Reason.OVER_QUOTA):
        return []
    try:
        found = kubectl.list(RLJOBS, "--all-namespaces")
    except AccessDenied:
        found = kubectl.list(RLJOBS)
    views = [one for body in found if (one := job_view(body)).uid != job.uid]
    return [one for one in views if one.pools_in_common(job) or one.tenant == job.tenant]

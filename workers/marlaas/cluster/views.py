"""Values parsed from the API server's JSON of jobs, pools and events. Unknown fields of a newer operator are accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from marlaas_api.kinds.status import Condition, ModelPoolStatus, ObjectStatus, RLJobStatus

WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class ClusterJobView:
    """One RLJob. Times are unix seconds.

    `status` is None until the operator sets one. `deleted_at` is the time when deletion was requested; None if it
    was not.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    pool: str
    created_at: float
    deleted_at: float | None = None
    status: RLJobStatus | None = None
    backoff_limit: int = 0

    @property
    def key(self) -> str:
        """Name as `<namespace>/<name>`."""
        return f"{self.namespace}/{self.name}"


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
        pool=body["spec"]["poolRef"]["name"],
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        deleted_at=seconds(meta.get("deletionTimestamp")),
        status=RLJobStatus.model_validate(status) if status else None,
        backoff_limit=body["spec"].get("backoffLimit", 0),
    )


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

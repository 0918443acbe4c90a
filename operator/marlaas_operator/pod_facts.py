"""Pod fields that policies need, parsed once from the API server's body. Pure.

Termination messages and image names come from tenants: terminal control characters in them are escaped here,
before they reach statuses and events.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from marlaas_api.last_words import visible

COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """State of one container.

    Attributes:
        waiting: reason why it does not run; empty if it runs or has ended.
        message: text of `waiting`.
        exit_code: of its last run that ended, None if there is none.
        last_words: termination message of that run.
    """

    name: str
    init: bool
    ready: bool
    restarts: int
    image: str = ""
    waiting: str = ""
    message: str = ""
    running: bool = False
    exit_code: int | None = None
    exit_reason: str = ""
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """State of one pod.

    Attributes:
        component: rollout, trainer or sandbox.
        created_at: unix seconds.
        unschedulable: the scheduler's message, empty if the pod has a node.
    """

    name: str
    component: str
    phase: str
    ready: bool
    created_at: float
    deleting: bool = False
    reason: str = ""
    message: str = ""
    unschedulable: str = ""
    containers: tuple[ContainerFacts, ...] = ()

    @property
    def restarts(self) -> int:
        """Restarts of its containers.

        Init containers do not count: they restart by design until their dependency exists.
        """
        return sum(container.restarts for container in self.containers if not container.init)

    @property
    def ended(self) -> bool:
        """Whether the pod has ended for good; its controller creates another."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def overran(self) -> bool:
        """Whether the kubelet evicted the pod for exceeding a limit (a full emptyDir).

        False if it was evicted because the node was short of a resource.
        """
        return self.reason == "Evicted" and "exceed" in self.message and not self.message.startswith("The node ")


def pod_facts(body: Mapping[str, Any]) -> PodFacts:
    """Parse a pod's body."""
    meta, status = body["metadata"], body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    return PodFacts(
        name=meta["name"],
        component=(meta.get("labels") or {}).get(COMPONENT, ""),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        created_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
        deleting=meta.get("deletionTimestamp") is not None,
        reason=status.get("reason") or "",
        message=visible(status.get("message") or ""),
        unschedulable=_words(scheduled) if scheduled.get("status") == "False" else "",
        containers=tuple(_containers(status)),
    )


def unix_seconds(time: str | None) -> float | None:
    """Parse a Kubernetes time to unix seconds; None for None."""
    return None if time is None else datetime.fromisoformat(time).timestamp()


def _words(condition: Mapping[str, Any]) -> str:
    return str(condition.get("message") or condition.get("reason") or "no node")


def _containers(status: Mapping[str, Any]) -> Iterator[ContainerFacts]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield _container(container, init=key.startswith("init"))


def _container(status: Mapping[str, Any], *, init: bool) -> ContainerFacts:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    return ContainerFacts(
        name=status["name"],
        init=init,
        ready=bool(status.get("ready")),
        restarts=int(status.get("restartCount") or 0),
        image=visible(status.get("image") or ""),
        waiting=waiting.get("reason") or "",
        message=visible(waiting.get("message") or ""),
        running="running" in state,
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason") or "",
        last_words=visible(ended.get("message") or ""),
    )

"""Pods: the fields that policies need, parsed once from the API server's body, and why a pod is not ready. Pure.

Termination messages and image names come from tenants: terminal control characters in them are escaped here,
before they reach statuses and events.

A fault lasts until the pod is ready. A container that crashed and runs again counts as faulty until its pod is ready, so that a crash loop
emits one event, not one per restart.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marlaas_api.kinds.status import unix_seconds
from marlaas_api.last_words import last_words, visible
from marlaas_api.reasons import Reason

COMPONENT = "app.kubernetes.io/component"
EXPORTER = "exporter"
"""Component of the pod that reports a job to trackers and webhooks."""
PREPARE = "model"
"""Name of the init container that prepares a pool's model."""

_PULLING = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_PULL_ERROR = "ErrImagePull: "
_NOT_STARTED = frozenset({"CreateContainerError", "RunContainerError", "PostStartHookError", "StartError"})
_INVALID_INPUT = 2
"""Exit code of our own processes for invalid input (`marlaas_worker.__main__`)."""
_KILLED = 137
_OUT_OF_MEMORY = "OOMKilled"
CRASH_WINDOW_S = 3600.0
"""A crash counts for so long, and a container that ran for longer is in no crash loop."""
_LOST_BY_NODE = frozenset({"Unknown", "ContainerStatusUnknown", "NodeLost"})
"""Reasons of containers that ended with their node (a reboot, a restart of its runtime)."""
_ENDED_BY_NODE = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"})


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """State of one container.

    Attributes:
        waiting: reason why it does not run; empty if it runs or has ended.
        message: text of `waiting`.
        exit_code: of its last run that ended, None if there is none.
        last_words: termination message of that run.
        ended_at, ran_s: when that run ended, unix seconds, and how long it took; 0 if unknown.
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
    ended_at: float = 0.0
    ran_s: float = 0.0

    def crashes(self, now: float) -> int:
        """Return the number of its crashes in a row. The node's faults do not count, nor do init containers: they restart by design."""
        is_old = bool(self.ended_at) and now - self.ended_at > CRASH_WINDOW_S
        if self.init or is_old or not self.restarts:
            return 0
        own = self.restarts - (self.exit_reason in _LOST_BY_NODE)
        return min(own, 1) if self.ran_s > CRASH_WINDOW_S else own


@dataclass(frozen=True, slots=True)
class PodFacts:
    """State of one pod.

    Attributes:
        component: rollout, trainer, sandbox or exporter.
        created_at: unix seconds.
        unschedulable: the scheduler's message, empty if the pod has a node.
        disrupted: preempted, evicted or drained; its condition DisruptionTarget.
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
    disrupted: bool = False
    containers: tuple[ContainerFacts, ...] = ()

    def crashes(self, now: float) -> int:
        """Return the crashes in a row of the container that crashes most; 0 if the node, not the pod, ended it."""
        if (self.disrupted or self.reason == "Evicted" or self.reason in _ENDED_BY_NODE) and not self.overran:
            return 0
        return max((container.crashes(now) for container in self.containers), default=0)

    def memory_kills(self, now: float) -> int:
        """Return the crashes in a row of a container that was last killed for exceeding its memory limit; 0 if none was."""
        killed = (container for container in self.containers if container.exit_reason == _OUT_OF_MEMORY)
        return min(self.crashes(now), max((container.crashes(now) for container in killed), default=0))

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
        unschedulable=_unscheduled_message(scheduled) if scheduled.get("status") == "False" else "",
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        containers=tuple(_containers(status)),
    )


def _unscheduled_message(condition: Mapping[str, Any]) -> str:
    return str(condition.get("message") or condition.get("reason") or "no node")


def _containers(status: Mapping[str, Any]) -> Iterator[ContainerFacts]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield _container(container, init=key.startswith("init"))


def _container(status: Mapping[str, Any], *, init: bool) -> ContainerFacts:
    state, last = status.get("state") or {}, status.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    ended_at = unix_seconds(ended.get("finishedAt")) or 0.0
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
        ended_at=ended_at,
        ran_s=max(0.0, ended_at - (unix_seconds(ended.get("startedAt")) or ended_at)),
    )


@dataclass(frozen=True, slots=True)
class PodFault:
    """Reason why a pod is not ready. restarts: of its containers so far."""

    reason: Reason
    message: str
    restarts: int = 0


def first_fault(pods: Iterable[PodFacts], owner: str = "") -> PodFault | None:
    """Return the fault of the first pod that has one. owner: text that names the pods' owner, for the message."""
    listed = sorted(pods, key=lambda pod: (pod.ended, pod.name))
    found = ((pod, pod_fault(pod)) for pod in listed if not _is_replaced(pod, listed))
    for pod, fault in found:
        if fault is not None:
            return PodFault(fault.reason, f"{pod.name}{owner}: {fault.message}", fault.restarts)
    return None


def pod_fault(pod: PodFacts) -> PodFault | None:
    """Return why a pod is not ready; None if it is ready, starting normally, ended or being deleted."""
    if pod.overran and not pod.deleting:
        return PodFault(Reason.CONTAINER_CRASHING, f"it was evicted: {pod.message.strip()}", pod.restarts)
    if pod.ready or pod.deleting or pod.ended:
        return None
    if pod.unschedulable:
        return _unscheduled(pod.unschedulable)
    for container in pod.containers:
        fault = _container_fault(container)
        if fault is not None:
            return PodFault(*fault, pod.restarts)
    return None


def _is_replaced(pod: PodFacts, pods: Iterable[PodFacts]) -> bool:
    """Return whether a pod has ended and a later one of its component is ready.

    The record of an evicted pod stays for a long time.
    """
    later = (other for other in pods if other.component == pod.component and other.created_at > pod.created_at)
    return pod.ended and any(other.ready for other in later)


def refusal_of(workload: Mapping[str, Any] | None) -> PodFault | None:
    """Return why a Deployment may not create pods (quota, admission); None if it may."""
    status = (workload or {}).get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return PodFault(Reason.POD_REFUSED, str(condition.get("message") or condition.get("reason") or "refused"))
    return None


def _unscheduled(message: str) -> PodFault:
    missing = "persistentvolumeclaim" in message and "not found" in message
    return PodFault(Reason.CONFIG_MISSING if missing else Reason.POD_UNSCHEDULABLE, message)


def _container_fault(container: ContainerFacts) -> tuple[Reason, str] | None:
    if container.waiting in _PULLING:
        return Reason.IMAGE_CANNOT_BE_PULLED, _pull_message(container)
    if container.waiting == "CreateContainerConfigError":
        return Reason.CONFIG_MISSING, container.message or "a Secret or ConfigMap that it refers to does not exist"
    if container.waiting in _NOT_STARTED:
        return Reason.CONTAINER_CRASHING, container.message or container.waiting
    if container.exit_code in (None, 0) or (container.init and container.ready):
        return None
    return _crash(container)


def _crash(container: ContainerFacts) -> tuple[Reason, str]:
    if container.exit_reason == _OUT_OF_MEMORY:
        return Reason.CONTAINER_OUT_OF_MEMORY, f"container {container.name} exceeded its memory limit"
    message = last_words(container.last_words) if container.last_words.strip() else _exit_message(container)
    if container.name == PREPARE and container.exit_code == _INVALID_INPUT:
        return Reason.MODEL_NOT_FOUND, message
    return Reason.CONTAINER_CRASHING, message


def _exit_message(container: ContainerFacts) -> str:
    if container.exit_code == _KILLED:
        return f"container {container.name} was killed"
    return f"container {container.name} ended with exit code {container.exit_code} and wrote no message"


def _pull_message(container: ContainerFacts) -> str:
    """Return a text that is the same while the kubelet pulls and while it backs off.

    The message names the cause in both states.
    """
    cause = container.message.rpartition(_PULL_ERROR)[2] if _PULL_ERROR in container.message else container.message
    cause = "" if cause.startswith("Back-off") else cause
    return f"image {container.image}{f': {cause}' if cause else ''}"

"""Faults of pods, as a reason and a message, and the limit of sandbox crashes per job (`spec.backoffLimit`).

A fault lasts until the pod is ready. A container that crashed and runs again counts as faulty until its pod is ready, so that a crash loop
emits one event, not one per restart.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from marlaas_api.last_words import last_words
from marlaas_api.messages import JobVerdict
from marlaas_api.reasons import Reason
from marlaas_operator.manifests.pool_pod import PREPARE
from marlaas_operator.pod_facts import ContainerFacts, PodFacts
from marlaas_operator.snapshot import JobSnapshot


def sandbox_crashes(snapshot: JobSnapshot) -> int:
    """Return the number of crashes of the job's sandboxes so far.

    A pod that was evicted because it wrote too much counts one crash more than its restarts. Replaced pods no
    longer show their restarts, so the stored number is a lower bound.
    """
    stored: Mapping[str, Any] = snapshot.status or {}
    return max(int(stored.get("sandboxCrashes") or 0), sum(pod.restarts + pod.overran for pod in snapshot.pods))


def crash_verdict(snapshot: JobSnapshot) -> JobVerdict | None:
    """Return the verdict that stops a job with too many sandbox crashes; None if it may continue."""
    progress, job = snapshot.own_progress, snapshot.job
    if job is None or progress is None or not progress.admitted or progress.phase.final:
        return None
    crashes, limit = sandbox_crashes(snapshot), job.spec.backoff_limit
    if crashes <= limit:
        return None
    fault = first_fault(snapshot.pods)
    words = f"; the last: {fault.message}" if fault is not None else ""
    text = f"its sandboxes have crashed {crashes} times, and backoffLimit is {limit}{words}"
    return JobVerdict(reason=Reason.BACKOFF_LIMIT_EXCEEDED, message=text)


FAULTS = frozenset(
    {
        Reason.BUS_UNAVAILABLE,
        Reason.IMAGE_CANNOT_BE_PULLED,
        Reason.POD_UNSCHEDULABLE,
        Reason.POD_REFUSED,
        Reason.CONFIG_MISSING,
        Reason.MODEL_NOT_FOUND,
        Reason.CONTAINER_CRASHING,
        Reason.CONTAINER_OUT_OF_MEMORY,
        Reason.INVALID_SPEC,
    }
)
"""Reasons that are reported by a Warning event when they begin, and by `Recovered` when they end."""

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
_ONLY_A_PERSON_CAN_HELP = 2
"""Exit code of our own processes for invalid input (`marlaas_worker.__main__`)."""
_KILLED = 137


@dataclass(frozen=True, slots=True)
class PodFault:
    """Reason why a pod is not ready. restarts: of its containers so far."""

    reason: Reason
    message: str
    restarts: int = 0


def first_fault(pods: Iterable[PodFacts], owner: str = "") -> PodFault | None:
    """Return the fault of the first pod that has one. owner: text that names the pods' owner, for the message."""
    listed = sorted(pods, key=lambda pod: (pod.ended, pod.name))
    found = ((pod, pod_fault(pod)) for pod in listed if not _is_made_up_for(pod, listed))
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


def _is_made_up_for(pod: PodFacts, pods: Iterable[PodFacts]) -> bool:
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


def _unscheduled(words: str) -> PodFault:
    missing = "persistentvolumeclaim" in words and "not found" in words
    return PodFault(Reason.CONFIG_MISSING if missing else Reason.POD_UNSCHEDULABLE, words)


def _container_fault(container: ContainerFacts) -> tuple[Reason, str] | None:
    if container.waiting in _PULLING:
        return Reason.IMAGE_CANNOT_BE_PULLED, _pull_words(container)
    if container.waiting == "CreateContainerConfigError":
        return Reason.CONFIG_MISSING, container.message or "a Secret or ConfigMap that it names is not there"
    if container.waiting in _NOT_STARTED:
        return Reason.CONTAINER_CRASHING, container.message or container.waiting
    if container.exit_code in (None, 0) or (container.init and container.ready):
        return None
    return _crash(container)


def _crash(container: ContainerFacts) -> tuple[Reason, str]:
    if container.exit_reason == "OOMKilled":
        return Reason.CONTAINER_OUT_OF_MEMORY, f"container {container.name} took more memory than its limit"
    words = last_words(container.last_words) if container.last_words.strip() else _silent(container)
    if container.name == PREPARE and container.exit_code == _ONLY_A_PERSON_CAN_HELP:
        return Reason.MODEL_NOT_FOUND, words
    return Reason.CONTAINER_CRASHING, words


def _silent(container: ContainerFacts) -> str:
    if container.exit_code == _KILLED:
        return f"container {container.name} was killed"
    return f"container {container.name} ended with exit code {container.exit_code} and said nothing"


def _pull_words(container: ContainerFacts) -> str:
    """Return a text that is the same while the kubelet pulls and while it backs off.

    The message names the cause in both states.
    """
    cause = container.message.rpartition(_PULL_ERROR)[2] if _PULL_ERROR in container.message else container.message
    told = "" if cause.startswith("Back-off") else cause
    return f"image {container.image}{f': {told}' if told else ''}"

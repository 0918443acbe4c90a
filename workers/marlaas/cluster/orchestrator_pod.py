"""Run a module of this package in the orchestrator's pod, which can reach the bus and the blob store."""

from collections.abc import Mapping, Sequence
from typing import Any

from marlaas.cluster.errors import ObjectMissing
from marlaas.cluster.kubectl import Kubectl
from marlaas_api.errors import InvalidInput

ORCHESTRATOR = "app.kubernetes.io/name=marlaas,app.kubernetes.io/component=orchestrator"
_CONTAINER = "orchestrator"


def output_of(kubectl: Kubectl, module: str, own: Sequence[str], words: Sequence[str]) -> bytes:
    """Return the standard output of `python -m module` in the orchestrator's pod.

    Args:
        own: flags that the module takes with the values that the orchestrator was started with, such as `--nats`.
        words: further arguments.

    Raises:
        AccessDenied: the user may not exec into the pod.
        InvalidInput: pods of several namespaces have the orchestrator's labels.
        ObjectMissing, CommandFailed.
    """
    pods = kubectl.list(
        "pods", "--all-namespaces", f"--selector={ORCHESTRATOR}", "--field-selector=status.phase=Running"
    )
    if not pods:
        raise ObjectMissing("no orchestrator pod runs in this cluster: ask the platform team")
    _check_alone(pods)
    meta = pods[0]["metadata"]
    command = ("python3", "-m", module, *_started_with(pods[0], own), *words)
    return kubectl.exec((meta["namespace"], meta["name"], _CONTAINER), command)


def _check_alone(pods: Sequence[Mapping[str, Any]]) -> None:
    """Reject orchestrator pods in several namespaces.

    Any tenant may put these labels on a pod of their own, which could then send a false adapter.
    """
    namespaces = sorted({str(pod["metadata"]["namespace"]) for pod in pods})
    if len(namespaces) > 1:
        raise InvalidInput(
            f"pods in the namespaces {', '.join(namespaces)} have the orchestrator's labels, and only one of "
            "them is the platform's; nothing was fetched: ask the platform team to remove the others"
        )


def _started_with(pod: Mapping[str, Any], own: Sequence[str]) -> tuple[str, ...]:
    container = next(one for one in pod["spec"]["containers"] if one["name"] == _CONTAINER)
    return tuple(word for word in container.get("args", ()) if word.partition("=")[0] in own)

"""Parts that all our pods share: restricted Pod Security, probes, volumes of limited size, the command of a worker.

A pod has no field for the number of processes: the kubelet limits it (`podPidsLimit`, see docs/operations.md). `marlaas run` starts
workers with the same command (`marlaas.local.processes`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.kinds import PullSecret, Toleration
from marlaas_operator.installation import Installation
from marlaas_operator.manifests import pods

PYTHON = ("python3", "-P", "-s", "-m")
"""-P: do not import from the image's working folder. -s: nor from below HOME, which a sandbox shares with
environment code and which outlives a container: a `usercustomize` left there would run in the next supervisor.
"""


UID = 10001
HEALTH_PORT = 8081
SCRATCH = "/scratch"
BUS_FOLDER = "/etc/marlaas/bus"
CREDENTIAL = "bus.creds"
"""Key of a Secret and file in BUS_FOLDER. The folder is mounted whole: a subPath mount would not receive renewed
credentials.
"""

Part = dict[str, Any]
"""A fragment of a manifest."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Scheduling constraints of a pod, and the Secrets to pull its images."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Toleration] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    priority_class_name: str | None = None
    runtime_class_name: str | None = None
    pull_secrets: Sequence[PullSecret | str] = ()


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume and its mount path. source: the volume's source in the PodSpec."""

    name: str
    path: str
    source: Part
    read_only: bool = False


def pod_spec(account: str, placement: Placement, volumes: Iterable[Volume], grace_s: int) -> Part:
    """Return a PodSpec without containers. grace_s: seconds from SIGTERM to SIGKILL."""
    spec: Part = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": volume.name, **volume.source} for volume in volumes],
    }
    return {**spec, **_placed(placement)}


def container(name: str, image: str, command: Sequence[str], volumes: Iterable[Volume]) -> Part:
    """Return a container without privileges or capabilities, which can write only to its volumes."""
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [_mount(volume) for volume in volumes],
    }


def worker_env(added: Mapping[str, str]) -> list[Part]:
    """Return the environment variables of a worker; those in `added` take precedence.

    HOME, USER and LOGNAME are set because our uid has no passwd entry in the image, and libraries need them.
    """
    fixed = {"HOME": SCRATCH, "USER": "marlaas", "LOGNAME": "marlaas", "PYTHONUNBUFFERED": "1"}
    values = [{"name": name, "value": value} for name, value in {**fixed, **added}.items()]
    return [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, *values]


def health(start_s: int) -> Part:
    """Return port and probes of a worker. start_s: longest start, in seconds.

    The liveness probe fails only after a minute: a busy machine must not restart an engine that takes a minute
    to load.
    """
    return {
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "startupProbe": {**_probe("/livez", 2), "failureThreshold": start_s // 2},
        "livenessProbe": {**_probe("/livez", 10), "failureThreshold": 6},
        "readinessProbe": {**_probe("/readyz", 2), "failureThreshold": 3},
    }


def empty(name: str, path: str, size: str | None = None, *, memory: bool = False) -> Volume:
    """Return an emptyDir volume. size: the pod is evicted above it; None: limited by the node."""
    source = {**({"medium": "Memory"} if memory else {}), **({"sizeLimit": size} if size else {})}
    return Volume(name, path, {"emptyDir": source})


def claim(name: str, path: str, claim_name: str, *, read_only: bool = False) -> Volume:
    """Return a volume for a PersistentVolumeClaim of the pod's namespace."""
    source: Part = {"claimName": claim_name, **({"readOnly": True} if read_only else {})}
    return Volume(name, path, {"persistentVolumeClaim": source}, read_only)


def secret(name: str, path: str, secret_name: str) -> Volume:
    """Return a volume with a Secret's keys as files; mode 0440 with fsGroup makes them readable for UID."""
    return Volume(name, path, {"secret": {"secretName": secret_name, "defaultMode": 0o440}}, read_only=True)


def _mount(volume: Volume) -> Part:
    return {
        "name": volume.name,
        "mountPath": volume.path,
        **({"readOnly": True} if volume.read_only else {}),
    }


def _probe(path: str, period_s: int) -> Part:
    return {"httpGet": {"path": path, "port": "health"}, "periodSeconds": period_s, "timeoutSeconds": 5}


def _placed(placement: Placement) -> Part:
    named = (secret if isinstance(secret, str) else secret.name for secret in placement.pull_secrets)
    said: Part = {
        "nodeSelector": dict(placement.node_selector),
        "tolerations": [_toleration(toleration) for toleration in placement.tolerations],
        "affinity": dict(placement.affinity),
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(named)],
    }
    return {key: value for key, value in said.items() if value}


def _toleration(toleration: Toleration) -> Part:
    return toleration.model_dump(mode="json", by_alias=True, exclude_none=True)


def worker_command(role: str, nats_url: str, blobs_url: str) -> list[str]:
    """Return the command of a role; the caller appends its document's file. The replica's name is the pod's."""
    return [
        *(*PYTHON, "marlaas_worker", role),
        *("--nats", nats_url, "--blobs", blobs_url),
        *("--name", "$(POD_NAME)", "--scratch", pods.SCRATCH),
        *("--creds", f"{pods.BUS_FOLDER}/{pods.CREDENTIAL}", "--health", str(pods.HEALTH_PORT)),
    ]


def packages_volumes(installation: Installation) -> tuple[Volume, ...]:
    """Return the volume with the Python packages, for an image without them."""
    packages = installation.python_environment
    if packages is None:
        return ()
    return (pods.claim("packages", packages.mount_path, packages.claim_name, read_only=True),)


def packages_env(installation: Installation) -> dict[str, str]:
    """Return the variable that points Python to that volume."""
    packages = installation.python_environment
    return {} if packages is None else {"PYTHONPATH": packages.python_path}

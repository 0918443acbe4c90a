"""Parts that the objects of pools and sandboxes share: names, labels, hashes, restricted Pod Security, volumes, probes.

A pod has no field for the number of processes: the kubelet limits it (`podPidsLimit`, see docs/how-to/pools.md). `marlaas run` starts
workers with the same command (`marlaas.local.processes`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.kinds import API_VERSION, PullSecret, Toleration
from marlaas_api.kinds.environment import RESERVED_ENDING
from marlaas_operator.installation import Installation
from marlaas_operator.plan import Manifest
from marlaas_operator.pod_facts import COMPONENT as COMPONENT
from marlaas_operator.snapshot import Meta

MANAGER = "marlaas-operator"
"""Field manager of every server-side apply, and value of the label that selects our objects."""

MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
POOL, JOB, JOB_UID, TENANT = "marlaas.dev/pool", "marlaas.dev/job", "marlaas.dev/job-uid", "marlaas.dev/tenant"
DESIRED_HASH = "marlaas.dev/desired-hash"
SECRET_HASH = "marlaas.dev/secret-hash"
"""Annotation on the workload that mounts a Secret: hash of the Secret's content when last applied. Secrets are
never read.
"""

ROLES = ("rollout", "trainer")
_LABEL = 63
_STATEFUL_SET = 52
"""Longest name of a StatefulSet: its pods have the label `<name>-<10 characters>` of at most 63."""


def sandbox_name(job: str) -> str:
    """Return the name of all objects that a job owns in its namespace.

    Its ending is reserved: a job cannot mount another job's Secret by `SecretRef`
    (`marlaas_api.kinds.environment`).
    """
    return f"{_fitted(job, _LABEL - len(RESERVED_ENDING))}{RESERVED_ENDING}"


def exporter_name(job: str) -> str:
    """Return the name of the objects of a job's exporter. The ending is reserved, too.

    No sandbox has such a name: a job's name does not end in a hyphen.
    """
    ending = f"-exporter-{RESERVED_ENDING}"
    return f"{_fitted(job, _LABEL - len(ending))}{ending}"


def workers_name(pool: str, role: str) -> str:
    """Return the name of a pool's objects for one role, in the release's namespace.

    A Service's name must begin with a letter; a pool's may begin with a digit, and then gets a prefix.
    """
    if pool[0].isdigit():
        return _cut(f"p-{pool}-{role}", _STATEFUL_SET)
    return _fitted(f"{pool}-{role}", _STATEFUL_SET)


def accounts_name(pool: str) -> str:
    """Return the name of the pool's ServiceAccount."""
    return _fitted(f"{pool}-workers", _LABEL)


def document_name(pool: str) -> str:
    """Return the name of the ConfigMap with the pool's document."""
    return _fitted(f"{pool}-pool", _LABEL)


def history_name(tenant: str) -> str:
    """Return the name of the ConfigMap with the tenant's usage history."""
    return _fitted(f"{tenant}-usage", _LABEL)


def labels(release: str, component: str, owner: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an owned object and of its pods. owner: POOL, or POOL, JOB and JOB_UID, or TENANT."""
    return {NAME: "marlaas", COMPONENT: component, INSTANCE: release, MANAGED_BY: MANAGER, **owner}


def owner_reference(kind: str, meta: Meta) -> dict[str, Any]:
    """Return the reference to an object's owner.

    Kubernetes deletes the object after its owner, even without the operator.
    """
    return {"apiVersion": API_VERSION, "kind": kind, "name": meta.name, "uid": meta.uid, "controller": True}


def digest(value: object) -> str:
    """Return a short hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamped(manifest: Manifest) -> Manifest:
    """Return the manifest with its hash as annotation.

    The hash reveals a new desired state however the server normalizes fields.
    """
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), DESIRED_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def _fitted(name: str, longest: int) -> str:
    return name if len(name) <= longest else _cut(name, longest)


def _cut(name: str, longest: int) -> str:
    """Cut a name to a length; it ends in 8 hex digits of its hash."""
    return f"{name[: longest - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


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


def config_map(name: str, path: str, config_map_name: str) -> Volume:
    """Return a volume with a ConfigMap's keys as files."""
    return Volume(name, path, {"configMap": {"name": config_map_name}}, read_only=True)


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
    fields: Part = {
        "nodeSelector": dict(placement.node_selector),
        "tolerations": [_toleration(toleration) for toleration in placement.tolerations],
        "affinity": dict(placement.affinity),
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(named)],
    }
    return {key: value for key, value in fields.items() if value}


def _toleration(toleration: Toleration) -> Part:
    return toleration.model_dump(mode="json", by_alias=True, exclude_none=True)


def worker_command(role: str, nats_url: str, blobs_url: str) -> list[str]:
    """Return the command of a role; the caller appends its document's file. The replica's name is the pod's."""
    return [
        *(*PYTHON, "marlaas_worker", role),
        *("--nats", nats_url, "--blobs", blobs_url),
        *("--name", "$(POD_NAME)", "--scratch", SCRATCH),
        *("--creds", f"{BUS_FOLDER}/{CREDENTIAL}", "--health", str(HEALTH_PORT)),
    ]


def packages_volumes(installation: Installation) -> tuple[Volume, ...]:
    """Return the volume with the Python packages, for an image without them."""
    packages = installation.python_environment
    if packages is None:
        return ()
    return (claim("packages", packages.mount_path, packages.claim_name, read_only=True),)


def packages_env(installation: Installation) -> dict[str, str]:
    """Return the variable that points Python to that volume."""
    packages = installation.python_environment
    return {} if packages is None else {"PYTHONPATH": packages.python_path}

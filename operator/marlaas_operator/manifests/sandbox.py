"""Objects of an admitted job in its own namespace: the sandbox's pod and what isolates it.

They are in the order of creation: each workload comes after everything that protects it. The ServiceAccount is
created first and deleted last, so its existence shows that other objects may exist.

Environment code has no access to the bus's credential. With a builtin environment, the supervisor hides it from
its children. With an image, only the supervisor's container mounts it, and the two containers share only the
folder of a socket.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from marlaas_api.kinds import SandboxBounds
from marlaas_api.messages import JobDocument
from marlaas_api.messages.job_spec import EnvironmentSettings
from marlaas_api.numeric import quantity
from marlaas_operator.installation import Installation
from marlaas_operator.manifests import network, pods
from marlaas_operator.manifests.pods import Part, Placement, Volume
from marlaas_operator.plan import Manifest
from marlaas_operator.snapshot import Meta

COMPONENT = "sandbox"
JOB_FILE = "job.json"
ENVIRONMENT_PREFIX = "MARLAAS_ENVIRONMENT_"
"""Prefix of the variables that the supervisor passes on to environment code (`marlaas_worker.sandbox.seclusion`)."""

_SOCKET_FOLDER = "/run/marlaas"
_SOCKET = f"{_SOCKET_FOLDER}/environment.sock"
_DATA = "/data"
"""Parent of the volumes of the environment's files."""
_BLOBS = f"file://{pods.SCRATCH}/blobs"
"""Required by the worker's command line; a sandbox stores no blobs."""
_GRACE_S = 15
"""A sandbox drains for at most 5 s (`marlaas_worker.sandbox.service.DRAIN_S`) and then kills its children."""
_START_S = 120
_SUPERVISOR_LIMIT_BYTES, _SUPERVISOR_REQUEST_BYTES = 512 << 20, 256 << 20
_CHILDREN_AT_THEIR_BOUND = 16


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Input of a sandbox's objects. bounds: from its pool. credential: text of its bus credential."""

    meta: Meta
    document: JobDocument
    bounds: SandboxBounds
    credential: str

    @property
    def environment(self) -> EnvironmentSettings:
        """The job's environment."""
        return self.document.spec.environment

    @property
    def name(self) -> str:
        """Name of all objects of the sandbox."""
        return pods.sandbox_name(self.meta.name)


def sandbox_secret(sandbox: Sandbox, installation: Installation) -> Manifest:
    """Return the Secret with the bus credential and the job's document; apply it before the Deployment.

    Only the supervisor's container mounts it.
    """
    return {**_object(sandbox, installation, "v1", "Secret"), "type": "Opaque", "data": _secret_data(sandbox)}


def sandbox_objects(sandbox: Sandbox, installation: Installation) -> tuple[Manifest, ...]:
    """Return ServiceAccount, NetworkPolicy and Deployment, in the order of creation."""
    account = {**_object(sandbox, installation, "v1", "ServiceAccount"), "automountServiceAccountToken": False}
    manifests = (account, _policy(sandbox, installation), _deployment(sandbox, installation))
    return tuple(pods.stamped(manifest) for manifest in manifests)


def _policy(sandbox: Sandbox, installation: Installation) -> Part:
    destinations = network.to_destinations(sandbox.environment.egress, installation)
    allowed = [*network.to_platform(installation), *destinations]
    policy = _object(sandbox, installation, "networking.k8s.io/v1", "NetworkPolicy")
    return {**policy, "spec": network.isolation(_selector(sandbox), allowed)}


def _deployment(sandbox: Sandbox, installation: Installation) -> Part:
    manifest = _object(sandbox, installation, "apps/v1", "Deployment")
    manifest["metadata"]["annotations"] = {pods.SECRET_HASH: pods.digest(_secret_data(sandbox))}
    manifest["spec"] = {
        "replicas": sandbox.environment.replicas,
        "selector": {"matchLabels": _selector(sandbox)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 1,
        "template": {
            "metadata": {"labels": manifest["metadata"]["labels"]},
            "spec": sandbox_pod(sandbox, installation),
        },
    }
    return manifest


def _object(sandbox: Sandbox, installation: Installation, api_version: str, kind: str) -> Part:
    owner = {
        pods.POOL: sandbox.document.pool,
        pods.JOB: sandbox.meta.name,
        pods.JOB_UID: sandbox.meta.uid,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": sandbox.name,
            "namespace": sandbox.meta.namespace,
            "labels": pods.labels(installation.release, COMPONENT, owner),
            "ownerReferences": [pods.owner_reference("RLJob", sandbox.meta)],
        },
    }


def _selector(sandbox: Sandbox) -> dict[str, str]:
    return {pods.COMPONENT: COMPONENT, pods.JOB_UID: sandbox.meta.uid}


def _secret_data(sandbox: Sandbox) -> dict[str, str]:
    data = {pods.CREDENTIAL: sandbox.credential, JOB_FILE: sandbox.document.model_dump_json()}
    return {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}


def sandbox_pod(sandbox: Sandbox, installation: Installation) -> Part:
    """Return the PodSpec of a sandbox."""
    writable = (pods.empty("scratch", pods.SCRATCH, "2Gi"), pods.empty("tmp", "/tmp", "1Gi"))
    credential = pods.secret("bus", pods.BUS_FOLDER, sandbox.name)
    data = _data(sandbox)
    mine = (*writable, credential, *pods.packages_volumes(installation))
    if sandbox.environment.image is None:
        mine = (*mine, *data)
        supervisor = _supervisor(sandbox, installation, mine) | {"envFrom": _secrets(sandbox, ENVIRONMENT_PREFIX)}
        return _spec(sandbox, installation, mine) | {"containers": [_without_empty(supervisor)]}
    socket = pods.empty("socket", _SOCKET_FOLDER, "1Mi")
    theirs = pods.empty("environment-tmp", "/tmp", "2Gi")
    supervisor = _supervisor(sandbox, installation, (*mine, socket))
    return _spec(sandbox, installation, (*mine, socket, theirs, *data)) | {
        "containers": [supervisor, _own_image(sandbox, sandbox.environment.image, (socket, theirs, *data))]
    }


def _data(sandbox: Sandbox) -> tuple[Volume, ...]:
    """Return the volumes of the environment's files."""
    found = []
    for volume in sandbox.environment.volumes:
        name, path = f"data-{volume.name}", f"{_DATA}/{volume.name}"
        if volume.pvc is not None:
            found.append(pods.claim(name, path, volume.pvc.claim_name, read_only=True))
        elif volume.config_map is not None:
            found.append(pods.config_map(name, path, volume.config_map.name))
    return tuple(found)


def _spec(sandbox: Sandbox, installation: Installation, volumes: Sequence[Volume]) -> Part:
    bounds = sandbox.bounds
    placement = Placement(
        node_selector=bounds.node_selector,
        tolerations=bounds.tolerations,
        runtime_class_name=bounds.runtime_class_name or installation.sandbox.runtime_class_name,
        # The installation's pull secrets work where they were copied into the job's namespace; Kubernetes ignores missing ones.
        pull_secrets=(
            *(ref.name for ref in sandbox.environment.image_pull_secrets),
            *installation.worker_image.pull_secrets,
        ),
    )
    return pods.pod_spec(sandbox.name, placement, volumes, _GRACE_S)


def _supervisor(sandbox: Sandbox, installation: Installation, volumes: Sequence[Volume]) -> Part:
    image = installation.worker_image
    own = sandbox.environment.image is not None
    command = [
        *pods.worker_command("sandbox", installation.nats_url, _BLOBS),
        *("--job-file", f"{pods.BUS_FOLDER}/{JOB_FILE}"),
        *(("--environment-socket", _SOCKET) if own else ()),
    ]
    return {
        **pods.container("supervisor", image.name, command, volumes),
        **pods.health(_START_S),
        "imagePullPolicy": image.pull_policy,
        "env": pods.worker_env(
            pods.packages_env(installation) | ({} if own else _data_env(sandbox, ENVIRONMENT_PREFIX))
        ),
        "resources": _resources(sandbox, installation.sandbox.default_cpu, children=not own),
    }


def _own_image(sandbox: Sandbox, image: str, volumes: Sequence[Volume]) -> Part:
    """Build the tenant's container with their image, command and Secrets; it has no bus credential and no port."""
    container = pods.container("environment", image, sandbox.environment.entrypoint, volumes)
    return _without_empty(
        {
            **container,
            "env": [
                {"name": "MARLAAS_ENVIRONMENT_SOCKET", "value": _SOCKET},
                {"name": "HOME", "value": "/tmp"},
                *({"name": name, "value": value} for name, value in _data_env(sandbox).items()),
            ],
            "envFrom": _secrets(sandbox, ""),
            "resources": _resources(sandbox, "0", children=True),
        }
    )


def _data_env(sandbox: Sandbox, prefix: str = "") -> dict[str, str]:
    """Return the variable that tells the environment where its volumes are (`marlaas.envs.data_folder`)."""
    return {f"{prefix}MARLAAS_DATA": _DATA} if sandbox.environment.volumes else {}


def _secrets(sandbox: Sandbox, prefix: str) -> list[Part]:
    """Return every key of the job's Secrets as environment variables."""
    sources = [{"secretRef": {"name": secret.name}} for secret in sandbox.environment.secret_refs]
    return [{"prefix": prefix, **source} if prefix else source for source in sources]


def _resources(sandbox: Sandbox, default_cpu: str, *, children: bool) -> Part:
    """Build the resources. CPU is requested for the container that plays episodes.

    `environment.memory` limits one child process, and a sandbox plays `concurrency` episodes, each in a child. All at
    their limit would need 32 GiB by default, too much to reserve on a node; and children share most pages with the fork
    server. So a container's limit is the supervisor's share and at most 16 children at their limit; its request covers
    one child.
    """
    environment = sandbox.environment
    child = int(quantity(environment.memory)) if children else 0
    held = child * min(environment.concurrency, _CHILDREN_AT_THEIR_BOUND)
    cpu = environment.cpu if children and environment.cpu is not None else default_cpu
    return {
        "requests": {"cpu": cpu, "memory": str(_SUPERVISOR_REQUEST_BYTES + child)},
        "limits": {"memory": str(_SUPERVISOR_LIMIT_BYTES + held)},
    }


def _without_empty(container: Part) -> Part:
    return {key: value for key, value in container.items() if value != []}

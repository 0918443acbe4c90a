"""Objects of a pool in the release's namespace: the document that its workers start with, and workers per role.

They are in the order of creation: the ServiceAccount first, and a StatefulSet after everything that its pods
mount and that protects them.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPool, ModelSpec, WorkersSpec
from marlaas_api.messages import PoolDocument
from marlaas_api.numeric import quantity
from marlaas_operator.installation import BlobSettings, Installation
from marlaas_operator.manifests import network, pods
from marlaas_operator.manifests.pods import Part, Placement, Volume
from marlaas_operator.plan import Manifest
from marlaas_operator.pod_facts import PREPARE
from marlaas_operator.snapshot import Meta

DOCUMENT_HASH = "marlaas.dev/document-hash"
"""Hash of the document, on pods; a change restarts them, one by one."""
DOCUMENT = "pool.json"
_DOCUMENT_FOLDER = "/etc/marlaas/pool"
_CACHE = "/cache"
_COMPILED = {
    "VLLM_CACHE_ROOT": f"{_CACHE}/compiled/vllm",
    "TRITON_CACHE_DIR": f"{_CACHE}/compiled/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{_CACHE}/compiled/inductor",
}
"""Where engines and trainers keep the kernels that they compile, and vLLM what it knows of model classes: with a claim for models, a new pod finds both there."""
_PREPARED = f"{pods.SCRATCH}/{DOCUMENT}"
_GRACE_S = 45
"""An engine drains for up to 20 s (`marlaas_worker.rollout.service.DRAIN_S`) and then stops.

A trainer finishes its micro-batch.
"""
_START_S = 1800
"""Longest start: reading the weights of a large model from a slow volume."""
MODEL_MOUNT = "/model"
"""Mount path of a model's PersistentVolumeClaim."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Input of a pool's objects. credentials: text of the bus credential, by role."""

    meta: Meta
    pool: ModelPool
    credentials: Mapping[str, str]

    def workers(self, role: str) -> WorkersSpec:
        """Return the spec of one role."""
        return self.pool.spec.rollout if role == "rollout" else self.pool.spec.trainer


def shared_objects(pool: Pool, installation: Installation) -> tuple[Manifest, ...]:
    """Return the ServiceAccount and the ConfigMap, which both roles use."""
    account = _object(pool, installation, ("v1", "ServiceAccount"), "") | {"automountServiceAccountToken": False}
    document = _object(pool, installation, ("v1", "ConfigMap"), "") | {"data": {DOCUMENT: _document(pool)}}
    account["metadata"]["name"] = pods.accounts_name(pool.meta.name)
    document["metadata"]["name"] = pods.document_name(pool.meta.name)
    return pods.stamped(account), pods.stamped(document)


def role_secret(pool: Pool, installation: Installation, role: str) -> Manifest:
    """Return the Secret with the role's bus credential; apply it before the StatefulSet."""
    secret = _object(pool, installation, ("v1", "Secret"), role)
    return {**secret, "type": "Opaque", "data": _secret_data(pool, role)}


def role_objects(pool: Pool, installation: Installation, role: str) -> tuple[Manifest, ...]:
    """Return NetworkPolicy, headless Service, PodDisruptionBudget and StatefulSet of one role."""
    policy = _object(pool, installation, ("networking.k8s.io/v1", "NetworkPolicy"), role)
    hub = network.to_hub(installation) if pool.pool.spec.model.hub is not None else []
    egress = [*network.to_platform(installation), *network.to_store(installation), *hub]
    readers = network.from_metrics_readers(installation, pods.HEALTH_PORT)
    policy["spec"] = network.isolation(_selector(pool, role), egress, readers)
    budget = _object(pool, installation, ("policy/v1", "PodDisruptionBudget"), role)
    budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": _selector(pool, role)}}
    manifests = (policy, _service(pool, installation, role), budget, _stateful_set(pool, installation, role))
    return tuple(pods.stamped(manifest) for manifest in manifests)


def _service(pool: Pool, installation: Installation, role: str) -> Part:
    service = _object(pool, installation, ("v1", "Service"), role)
    port = {"name": "health", "port": pods.HEALTH_PORT, "protocol": "TCP", "targetPort": "health"}
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selector(pool, role),
        "ports": [port],
    }
    return service


def _stateful_set(pool: Pool, installation: Installation, role: str) -> Part:
    """Build the StatefulSet: pod names are stable, because leases and the owners of episodes refer to them.

    It is Parallel, because replicas do not wait for each other, and so that a broken revision does not block
    the next one.
    """
    manifest = _object(pool, installation, ("apps/v1", "StatefulSet"), role)
    manifest["metadata"]["annotations"] = {pods.SECRET_HASH: pods.digest(_secret_data(pool, role))}
    manifest["spec"] = {
        "replicas": pool.workers(role).replicas,
        "serviceName": pods.workers_name(pool.meta.name, role),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": _selector(pool, role)},
        "template": {
            "metadata": {
                "labels": manifest["metadata"]["labels"],
                "annotations": {DOCUMENT_HASH: pods.digest(_document(pool))},
            },
            "spec": worker_pod(pool.pool, installation, role),
        },
    }
    return manifest


def _object(pool: Pool, installation: Installation, kind: tuple[str, str], role: str) -> Part:
    """Build an object without content. kind: (apiVersion, kind); role: empty for objects that both roles share."""
    return {
        "apiVersion": kind[0],
        "kind": kind[1],
        "metadata": {
            "name": pods.workers_name(pool.meta.name, role),
            "namespace": installation.namespace,
            "labels": pods.labels(installation.release, role or "pool", {pods.POOL: pool.meta.name}),
            "ownerReferences": [pods.owner_reference("ModelPool", pool.meta)],
        },
    }


def _selector(pool: Pool, role: str) -> dict[str, str]:
    return {pods.COMPONENT: role, pods.POOL: pool.meta.name}


def _secret_data(pool: Pool, role: str) -> dict[str, str]:
    return {pods.CREDENTIAL: base64.b64encode(pool.credentials[role].encode()).decode()}


def _document(pool: Pool) -> str:
    return pool_document(pool.pool).model_dump_json()


def worker_pod(pool: ModelPool, installation: Installation, role: str) -> Part:
    """Return the PodSpec of one role."""
    workers = pool.spec.rollout if role == "rollout" else pool.spec.trainer
    volumes = _volumes(pool, installation, role)
    account = pods.accounts_name(pool.metadata.name)
    spec = pods.pod_spec(account, _placement(workers, installation), volumes, _GRACE_S)
    return {
        **spec,
        "initContainers": [_prepare(pool, installation, workers, volumes)],
        "containers": [_worker(installation, workers, role, volumes)],
    }


def _placement(workers: WorkersSpec, installation: Installation) -> Placement:
    return Placement(
        node_selector=workers.node_selector,
        tolerations=workers.tolerations,
        affinity=workers.affinity,
        priority_class_name=workers.priority_class_name,
        pull_secrets=(*installation.worker_image.pull_secrets, *workers.image_pull_secrets),
    )


def _volumes(pool: ModelPool, installation: Installation, role: str) -> tuple[Volume, ...]:
    document: Part = {"configMap": {"name": pods.document_name(pool.metadata.name)}}
    cache = installation.model_cache.claim_name
    claimed = pool.spec.model.pvc
    return (
        pods.empty("scratch", pods.SCRATCH, "32Gi"),
        pods.empty("tmp", "/tmp", "4Gi"),
        # An engine and its workers communicate by shared memory; a container's default /dev/shm is 64 MiB.
        pods.empty("shared-memory", "/dev/shm", "2Gi", memory=True),
        pods.claim("cache", _CACHE, cache) if cache else pods.empty("cache", _CACHE),
        Volume("document", _DOCUMENT_FOLDER, document, read_only=True),
        pods.secret("bus", pods.BUS_FOLDER, pods.workers_name(pool.metadata.name, role)),
        *_blob_volumes(installation.blobs),
        *((pods.claim("model", MODEL_MOUNT, claimed.claim_name, read_only=True),) if claimed else ()),
        *pods.packages_volumes(installation),
    )


def _blob_volumes(blobs: BlobSettings) -> tuple[Volume, ...]:
    return (pods.claim("blobs", urlsplit(blobs.url).path, blobs.claim_name),) if blobs.claim_name else ()


def _prepare(pool: ModelPool, installation: Installation, workers: WorkersSpec, volumes: Sequence[Volume]) -> Part:
    """Build the init container: it prepares the model and writes the document with the model's path.

    It alone has the hub's token, and it does not have the bus's credential.
    """
    command = [
        *pods.PYTHON,
        "marlaas_worker.prepare",
        "--pool-file",
        f"{_DOCUMENT_FOLDER}/{DOCUMENT}",
        "--out",
        _PREPARED,
    ]
    mounted = [volume for volume in volumes if volume.name not in ("bus", "blobs")]
    base = _base(PREPARE, installation, workers, (command, mounted))
    hub = pool.spec.model.hub
    token = hub.token_secret_ref if hub is not None else None
    if token is None:
        return base
    source = {"secretKeyRef": {"name": token.name, "key": token.key}}
    return {**base, "env": [*base["env"], {"name": "HF_TOKEN", "valueFrom": source}]}


def _worker(installation: Installation, workers: WorkersSpec, role: str, volumes: Sequence[Volume]) -> Part:
    command = [*pods.worker_command(role, installation.nats_url, installation.blobs.url), "--pool-file", _PREPARED]
    base = {**_base(role, installation, workers, (command, volumes)), **pods.health(_START_S)}
    base["env"] += [{"name": name, "value": value} for name, value in _COMPILED.items()]
    store = installation.blobs.secret_name
    return {**base, "envFrom": [{"secretRef": {"name": store}}]} if store else base


def _base(
    name: str, installation: Installation, workers: WorkersSpec, what: tuple[Sequence[str], Sequence[Volume]]
) -> Part:
    """Build a container of the worker's image. what: its command and its volumes."""
    added = {"MARLAAS_CACHE": _CACHE, "MARLAAS_MODEL_MOUNT": MODEL_MOUNT, **pods.packages_env(installation)}
    return {
        **pods.container(name, workers.image or installation.worker_image.name, *what),
        "imagePullPolicy": installation.worker_image.pull_policy,
        "env": pods.worker_env(added),
        "resources": _resources(workers),
    }


def _resources(workers: WorkersSpec) -> Part:
    """Build the resources: requests of memory and GPUs equal their limits.

    The scheduler then reserves the full amount.
    """
    memory = {"memory": workers.memory} if workers.memory else {}
    gpus = {"nvidia.com/gpu": str(workers.gpus)} if workers.gpus else {}
    cpu = {"cpu": workers.cpu} if workers.cpu else {}
    found = {"requests": {**cpu, **memory, **gpus}, "limits": {**memory, **gpus}}
    return {key: value for key, value in found.items() if value}


def pool_document(pool: ModelPool) -> PoolDocument:
    """Return the document of a pool's workers. model_path is empty where the init container determines it."""
    spec = pool_spec(pool.spec)
    workers = {
        "rollout": spec.rollout.model_copy(update=_in_pod(pool.spec.rollout)),
        "trainer": spec.trainer.model_copy(update=_in_pod(pool.spec.trainer)),
    }
    path = _model_path(pool.spec.model)
    return PoolDocument(name=pool.metadata.name, model_path=path, spec=spec.model_copy(update=workers))


def _in_pod(workers: WorkersSpec) -> dict[str, int | None]:
    """Return the number of workers in one pod, and their `threads`; if unset, derive these from the CPU request.

    Without it, a process would use as many threads as the whole node has cores.
    """
    threads = workers.threads
    if threads is None and workers.cpu is not None:
        threads = max(1, math.ceil(quantity(workers.cpu)))
    return {"replicas": 1, "threads": threads}


def _model_path(model: ModelSpec) -> str:
    if model.pvc is not None:
        return f"{MODEL_MOUNT}/{model.pvc.path.strip('/')}".rstrip("/")
    return model.path or ""

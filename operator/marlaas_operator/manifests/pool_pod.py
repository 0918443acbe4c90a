"""Pod of a rollout or trainer worker: an init container prepares the model, the main container runs the worker."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from marlaas_api.kinds import ModelPool, WorkersSpec
from marlaas_operator.installation import BlobSettings, Installation
from marlaas_operator.manifests import names, pods
from marlaas_operator.manifests.pods import (
    PYTHON,
    Part,
    Placement,
    Volume,
    packages_env,
    packages_volumes,
    worker_command,
)
from marlaas_operator.manifests.pool_document import MODEL_MOUNT

DOCUMENT = "pool.json"
PREPARE = "model"
"""Name of the init container that prepares the model."""

_DOCUMENT_FOLDER = "/etc/marlaas/pool"
_CACHE = "/cache"
_PREPARED = f"{pods.SCRATCH}/{DOCUMENT}"
_GRACE_S = 45
"""An engine drains for up to 20 s (`marlaas_worker.rollout.service.DRAIN_S`) and then stops.

A trainer finishes its micro-batch.
"""
_START_S = 1800
"""Longest start: reading the weights of a large model from a slow volume."""


def worker_pod(pool: ModelPool, installation: Installation, role: str) -> Part:
    """Return the PodSpec of one role."""
    workers = pool.spec.rollout if role == "rollout" else pool.spec.trainer
    volumes = _volumes(pool, installation, role)
    account = names.accounts_name(pool.metadata.name)
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
    document: Part = {"configMap": {"name": names.document_name(pool.metadata.name)}}
    cache = installation.model_cache.claim_name
    claimed = pool.spec.model.pvc
    return (
        pods.empty("scratch", pods.SCRATCH, "32Gi"),
        pods.empty("tmp", "/tmp", "4Gi"),
        # An engine and its workers communicate by shared memory; a container's default /dev/shm is 64 MiB.
        pods.empty("shared-memory", "/dev/shm", "2Gi", memory=True),
        pods.claim("cache", _CACHE, cache) if cache else pods.empty("cache", _CACHE),
        Volume("document", _DOCUMENT_FOLDER, document, read_only=True),
        pods.secret("bus", pods.BUS_FOLDER, names.workers_name(pool.metadata.name, role)),
        *_blob_volumes(installation.blobs),
        *((pods.claim("model", MODEL_MOUNT, claimed.claim_name, read_only=True),) if claimed else ()),
        *packages_volumes(installation),
    )


def _blob_volumes(blobs: BlobSettings) -> tuple[Volume, ...]:
    return (pods.claim("blobs", urlsplit(blobs.url).path, blobs.claim_name),) if blobs.claim_name else ()


def _prepare(pool: ModelPool, installation: Installation, workers: WorkersSpec, volumes: Sequence[Volume]) -> Part:
    """Build the init container: it prepares the model and writes the document with the model's path.

    It alone has the hub's token, and it does not have the bus's credential.
    """
    command = [*PYTHON, "marlaas_worker.prepare", "--pool-file", f"{_DOCUMENT_FOLDER}/{DOCUMENT}", "--out", _PREPARED]
    mounted = [volume for volume in volumes if volume.name not in ("bus", "blobs")]
    base = _base(PREPARE, installation, workers, (command, mounted))
    hub = pool.spec.model.hub
    token = hub.token_secret_ref if hub is not None else None
    if token is None:
        return base
    source = {"secretKeyRef": {"name": token.name, "key": token.key}}
    return {**base, "env": [*base["env"], {"name": "HF_TOKEN", "valueFrom": source}]}


def _worker(installation: Installation, workers: WorkersSpec, role: str, volumes: Sequence[Volume]) -> Part:
    command = [*worker_command(role, installation.nats_url, installation.blobs.url), "--pool-file", _PREPARED]
    base = {**_base(role, installation, workers, (command, volumes)), **pods.health(_START_S)}
    store = installation.blobs.secret_name
    return {**base, "envFrom": [{"secretRef": {"name": store}}]} if store else base


def _base(
    name: str, installation: Installation, workers: WorkersSpec, what: tuple[Sequence[str], Sequence[Volume]]
) -> Part:
    """Build a container of the worker's image. what: its command and its volumes."""
    added = {"MARLAAS_CACHE": _CACHE, "MARLAAS_MODEL_MOUNT": MODEL_MOUNT, **packages_env(installation)}
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

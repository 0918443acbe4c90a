"""The document that a pool's workers are started with, without what is none of their business: its change restarts engines."""

import math
from typing import TypeVar

from marlaas_api.kinds import ModelPool, ModelSpec, SandboxBounds, WorkersSpec
from marlaas_api.kinds.base import quantity
from marlaas_api.messages import PoolDocument

MODEL_MOUNT = "/model"
"""Where a model's PersistentVolumeClaim is mounted."""

_PLACED = ("replicas", "node_selector", "tolerations", "affinity", "priority_class_name", "image", "image_pull_secrets")

W = TypeVar("W", bound=WorkersSpec)


def pool_document(pool: ModelPool) -> PoolDocument:
    """What the workers of a pool need to know. model_path is empty where the init container finds it."""
    spec = pool.spec.model_copy(
        update={
            "rollout": _workers(pool.spec.rollout),
            "trainer": _workers(pool.spec.trainer),
            "namespaces": (),
            "sandbox": SandboxBounds(),
        }
    )
    return PoolDocument(name=pool.metadata.name, model_path=_model_path(spec.model), spec=spec)


def _workers(workers: W) -> W:
    """Without placement. A worker that asked for some cores computes on as many: it would see those of the whole node."""
    fields = type(workers).model_fields
    update = {name: fields[name].get_default(call_default_factory=True) for name in _PLACED}
    if workers.threads is None and workers.cpu is not None:
        update["threads"] = max(1, math.ceil(quantity(workers.cpu)))
    return workers.model_copy(update=update)


def _model_path(model: ModelSpec) -> str:
    if model.pvc is not None:
        return f"{MODEL_MOUNT}/{model.pvc.path.strip('/')}".rstrip("/")
    return model.path or ""

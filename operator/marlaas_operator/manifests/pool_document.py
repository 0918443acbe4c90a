"""Document that a pool's workers start with.

It omits fields that workers do not use, because a change restarts engines.
"""

import math
from typing import TypeVar

from marlaas_api.kinds import ModelPool, ModelSpec, SandboxBounds, WorkersSpec
from marlaas_api.messages import PoolDocument
from marlaas_api.numeric import quantity

MODEL_MOUNT = "/model"
"""Mount path of a model's PersistentVolumeClaim."""

_PLACED = ("replicas", "node_selector", "tolerations", "affinity", "priority_class_name", "image", "image_pull_secrets")

W = TypeVar("W", bound=WorkersSpec)


def pool_document(pool: ModelPool) -> PoolDocument:
    """Return the document of a pool's workers. model_path is empty where the init container determines it."""
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
    """Drop the placement, and derive `threads` from the CPU request if unset.

    Without it, a process would use as many threads as the whole node has cores.
    """
    fields = type(workers).model_fields
    update = {name: fields[name].get_default(call_default_factory=True) for name in _PLACED}
    if workers.threads is None and workers.cpu is not None:
        update["threads"] = max(1, math.ceil(quantity(workers.cpu)))
    return workers.model_copy(update=update)


def _model_path(model: ModelSpec) -> str:
    if model.pvc is not None:
        return f"{MODEL_MOUNT}/{model.pvc.path.strip('/')}".rstrip("/")
    return model.path or ""

"""Document that a pool's workers start with.

It omits fields that workers do not use, because a change restarts engines.
"""

import math

from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPool, ModelSpec, WorkersSpec
from marlaas_api.messages import PoolDocument
from marlaas_api.numeric import quantity

MODEL_MOUNT = "/model"
"""Mount path of a model's PersistentVolumeClaim."""


def pool_document(pool: ModelPool) -> PoolDocument:
    """Return the document of a pool's workers. model_path is empty where the init container determines it."""
    spec = pool_spec(pool.spec)
    workers = {
        "rollout": spec.rollout.model_copy(update=_pods(pool.spec.rollout)),
        "trainer": spec.trainer.model_copy(update=_pods(pool.spec.trainer)),
    }
    path = _model_path(pool.spec.model)
    return PoolDocument(name=pool.metadata.name, model_path=path, spec=spec.model_copy(update=workers))


def _pods(workers: WorkersSpec) -> dict[str, int | None]:
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

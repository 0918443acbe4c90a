"""Conversion of an RLJob object into a job document, shared by `marlaas run` and the operator. Pure."""

from collections.abc import Iterable

from marlaas_api.kinds import RLJob, RLJobSpec, Tenant
from marlaas_api.messages import JobDocument

_ASIDE = frozenset(
    {
        *("priority", "suspend", "active_deadline_seconds", "ttl_seconds_after_finished", "backoff_limit"),
        *("export", "adapter_retention"),
    }
)
"""Fields of a job's spec that affect neither episodes nor training.

A change of any other field, including fields added later, restarts the job's loop.
"""
_LOOP = tuple(name for name in RLJobSpec.model_fields if name not in _ASIDE)


def job_document(
    job: RLJob, tenants: Iterable[Tenant], uid: str, seed: int | None, created_at: float = 0.0
) -> JobDocument:
    """Build the job document of an RLJob.

    Args:
        tenants: in order of precedence.
        seed: None takes `spec.training.seed`.
        created_at: unix seconds; determines the job's position in the queue.
    """
    tenant = tenant_of(job.metadata.namespace, tenants)
    return JobDocument(
        namespace=job.metadata.namespace,
        job=job.metadata.name,
        uid=uid,
        created_at=created_at,
        pool=job.spec.pool_ref.name,
        tenant=tenant.metadata.name if tenant is not None else job.metadata.namespace,
        tenant_weight=tenant.spec.weight if tenant is not None else 1.0,
        seed=job.spec.training.seed if seed is None else seed,
        spec=job.spec,
    )


def tenant_of(namespace: str, tenants: Iterable[Tenant]) -> Tenant | None:
    """Return the first tenant that has the namespace; None: the namespace counts as its own tenant, of weight 1."""
    return next((tenant for tenant in tenants if namespace in tenant.spec.namespaces), None)


def concerns_loop(before: JobDocument, after: JobDocument) -> bool:
    """Whether a change of a job's document requires the orchestrator and the trainer to restart their work on the job.

    Changes of priority, times, limits, the tenant and its weight do not: the orchestrator re-reads them while the job
    runs. Fields that stop the job (`suspend`, `deleted`, `verdict`) are not compared here.
    """
    return before is not after and _loop(before) != _loop(after)


def _loop(document: JobDocument) -> tuple[object, ...]:
    fixed = (document.namespace, document.job, document.uid, document.pool, document.seed)
    return (*fixed, *(getattr(document.spec, name) for name in _LOOP))

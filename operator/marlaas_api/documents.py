"""From a manifest's object to what is to run: the one decision that `marlaas run` and the operator share. Pure."""

from collections.abc import Iterable

from marlaas_api.kinds import RLJob, RLJobSpec, Tenant
from marlaas_api.messages import JobDocument

_ASIDE = frozenset(
    {
        *("priority", "suspend", "active_deadline_seconds", "ttl_seconds_after_finished", "backoff_limit"),
        *("export", "adapter_retention"),
    }
)
"""Fields of a job's spec from which nothing is played or trained. A field that is new concerns the loop until it is named here."""
_LOOP = tuple(name for name in RLJobSpec.model_fields if name not in _ASIDE)


def job_document(
    job: RLJob, tenants: Iterable[Tenant], uid: str, seed: int | None, created_at: float = 0.0
) -> JobDocument:
    """What to run, from the manifest's object.

    Args:
        tenants: in order of precedence.
        seed: None takes the manifest's own.
        created_at: unix seconds; the job's place in the queue.
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
    """The first tenant that the namespace belongs to; None: the namespace is a tenant by itself, of weight 1."""
    return next((tenant for tenant in tenants if namespace in tenant.spec.namespaces), None)


def concerns_loop(before: JobDocument, after: JobDocument) -> bool:
    """Whether a change of a job's document concerns the tasks that play and train it: only then are they restarted.

    Priority, times, limits, the tenant and its weight do not: the orchestrator reads them anew while the job runs. Whether the job is to stop
    (`suspend`, `deleted`, `verdict`) is not asked here.
    """
    return before is not after and _loop(before) != _loop(after)


def _loop(document: JobDocument) -> tuple[object, ...]:
    fixed = (document.namespace, document.job, document.uid, document.pool, document.seed)
    return (*fixed, *(getattr(document.spec, name) for name in _LOOP))

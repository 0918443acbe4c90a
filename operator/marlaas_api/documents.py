"""From a manifest's object to what is to run: the one decision that `marlaas run` and the operator share. Pure."""

from collections.abc import Iterable

from marlaas_api.kinds import RLJob, Tenant
from marlaas_api.messages import JobDocument


def job_document(job: RLJob, tenants: Iterable[Tenant], uid: str, seed: int | None) -> JobDocument:
    """What to run, from the manifest's object; tenants in order of precedence, `seed` None takes the manifest's own."""
    tenant = tenant_of(job.metadata.namespace, tenants)
    return JobDocument(
        namespace=job.metadata.namespace,
        job=job.metadata.name,
        uid=uid,
        pool=job.spec.pool_ref.name,
        tenant=tenant.metadata.name if tenant is not None else job.metadata.namespace,
        tenant_weight=tenant.spec.weight if tenant is not None else 1.0,
        seed=job.spec.training.seed if seed is None else seed,
        spec=job.spec,
    )


def tenant_of(namespace: str, tenants: Iterable[Tenant]) -> Tenant | None:
    """The first tenant that the namespace belongs to; None: the namespace is a tenant by itself, of weight 1."""
    return next((tenant for tenant in tenants if namespace in tenant.spec.namespaces), None)

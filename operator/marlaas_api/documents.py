"""Conversion of manifests into documents, shared by `marlaas run` and the operator. Pure.

A document's field takes the value of the manifest's field of the same name; fields that a document lacks are left out.
"""

from collections.abc import Iterable
from typing import TypeVar

from marlaas_api.kinds import ModelPoolSpec, ModelSpec, RLJob, RLJobSpec, Spec, Tenant
from marlaas_api.kinds.chat_template import ChatTemplateSpec, PoolChatTemplateSpec
from marlaas_api.messages import JobDocument, JobSpec, PoolSpec, TenantQuota
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.base import SpecPart
from marlaas_api.messages.job_spec import ChatTemplateSettings, PoolChatTemplateSettings
from marlaas_api.messages.pool_spec import ModelSource
from marlaas_api.names import DEFAULT_TENANT

P = TypeVar("P", bound=SpecPart)


def job_spec(spec: RLJobSpec) -> JobSpec:
    """Return the spec of a job's document.

    An agent that plays another one's policy gets that one's adapter and pool.
    """
    converted = _converted(JobSpec, spec)
    by_name = {agent.name: agent for agent in converted.agents}
    agents = tuple(_player(agent, by_name.get(agent.policy_name, agent)) for agent in converted.agents)
    return converted.model_copy(update={"agents": agents})


def _player(agent: AgentSettings, owner: AgentSettings) -> AgentSettings:
    if agent is owner:
        return agent
    trainable = owner.trainable and not agent.plays_past
    return agent.model_copy(update={"adapter": owner.adapter, "pool_ref": owner.pool_ref, "trainable": trainable})


def pool_spec(spec: ModelPoolSpec) -> PoolSpec:
    """Return the spec of a pool's document."""
    return _converted(PoolSpec, spec)


def model_source(model: ModelSpec) -> ModelSource:
    """Return the base model in a pool's document."""
    return _converted(ModelSource, model)


def chat_template_settings(spec: ChatTemplateSpec) -> ChatTemplateSettings:
    """Return a job's chat template in a document."""
    return _converted(ChatTemplateSettings, spec)


def pool_chat_template_settings(spec: PoolChatTemplateSpec) -> PoolChatTemplateSettings:
    """Return a pool's chat template in a document."""
    return _converted(PoolChatTemplateSettings, spec)


def _converted(into: type[P], part: Spec) -> P:
    # Names only: a look-up of the aliases first takes four times as long, and the operator converts at each reconcile.
    return into.model_validate(part, from_attributes=True, by_alias=False, by_name=True)


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
        tenant=tenant.metadata.name if tenant is not None else DEFAULT_TENANT,
        tenant_weight=tenant.spec.weight if tenant is not None else 1.0,
        tenant_quota=_converted(TenantQuota, tenant.spec.quota) if tenant is not None else TenantQuota(),
        seed=job.spec.training.seed if seed is None else seed,
        spec=job_spec(job.spec),
    )


def tenant_of(namespace: str, tenants: Iterable[Tenant]) -> Tenant | None:
    """Return the first tenant that has the namespace; None: it belongs to the default tenant (`DEFAULT_TENANT`)."""
    return next((tenant for tenant in tenants if namespace in tenant.spec.namespaces), None)

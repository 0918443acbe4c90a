"""The kinds of `marlaas.dev/v1alpha1` as pydantic models; `crds/` is generated from them."""

from marlaas_api.kinds.base import API_VERSION, GROUP, VERSION, Kind, ObjectMeta, quantity
from marlaas_api.kinds.modelpool import ModelPool, ModelPoolSpec, ModelSpec, RolloutWorkers, WorkersSpec
from marlaas_api.kinds.rljob import (
    AdapterSpec,
    AgentSpec,
    EnvironmentSpec,
    EvaluationSpec,
    OptimizerSpec,
    RLJob,
    RLJobSpec,
    RolloutSpec,
    TrainingSpec,
)
from marlaas_api.kinds.tenant import QuotaSpec, Tenant, TenantSpec

KINDS: tuple[type[Kind], ...] = (RLJob, ModelPool, Tenant)

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "VERSION",
    "AdapterSpec",
    "AgentSpec",
    "EnvironmentSpec",
    "EvaluationSpec",
    "Kind",
    "ModelPool",
    "ModelPoolSpec",
    "ModelSpec",
    "ObjectMeta",
    "OptimizerSpec",
    "QuotaSpec",
    "RLJob",
    "RLJobSpec",
    "RolloutSpec",
    "RolloutWorkers",
    "Tenant",
    "TenantSpec",
    "TrainingSpec",
    "WorkersSpec",
    "quantity",
]

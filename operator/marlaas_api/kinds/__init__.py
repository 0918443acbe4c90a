"""The kinds of `marlaas.dev/v1alpha1` as pydantic models; `crds/` is generated from them."""

from marlaas_api.kinds.agent import AdapterSpec, AgentSpec, AgentTraining, InitFrom, PoolRef
from marlaas_api.kinds.base import API_VERSION, GROUP, VERSION, Kind, ObjectMeta, Spec
from marlaas_api.kinds.data import DataSpec, SkipSpec
from marlaas_api.kinds.environment import Egress, EnvironmentSpec, SecretRef
from marlaas_api.kinds.export import ExportSpec
from marlaas_api.kinds.modelpool import (
    ClaimModel,
    HubModel,
    ModelPool,
    ModelPoolSpec,
    ModelSpec,
    RolloutWorkers,
    SandboxBounds,
    TrainerWorkers,
    WorkersSpec,
)
from marlaas_api.kinds.objective import ClipSpec, CorrectionSpec, EntropySpec, KlReference, KlSpec, OverlongSpec
from marlaas_api.kinds.optimizer import AgentOptimizer, OptimizerSpec
from marlaas_api.kinds.placement import PullSecret, SecretKeyRef, Toleration
from marlaas_api.kinds.rljob import RLJob, RLJobSpec
from marlaas_api.kinds.status import (
    AgentStatus,
    Condition,
    ModelPoolStatus,
    ObjectStatus,
    RLJobStatus,
    TenantStatus,
    WorkersStatus,
)
from marlaas_api.kinds.tenant import QuotaSpec, Tenant, TenantSpec
from marlaas_api.kinds.training import CheckpointSpec, EvaluationSpec, RolloutSpec, TrainingSpec

KINDS: tuple[type[Kind], ...] = (RLJob, ModelPool, Tenant)

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "VERSION",
    "AdapterSpec",
    "AgentOptimizer",
    "AgentSpec",
    "AgentStatus",
    "AgentTraining",
    "CheckpointSpec",
    "ClaimModel",
    "ClipSpec",
    "Condition",
    "CorrectionSpec",
    "DataSpec",
    "Egress",
    "EntropySpec",
    "EnvironmentSpec",
    "EvaluationSpec",
    "ExportSpec",
    "HubModel",
    "InitFrom",
    "Kind",
    "KlReference",
    "KlSpec",
    "ModelPool",
    "ModelPoolSpec",
    "ModelPoolStatus",
    "ModelSpec",
    "ObjectMeta",
    "ObjectStatus",
    "OptimizerSpec",
    "OverlongSpec",
    "PoolRef",
    "PullSecret",
    "QuotaSpec",
    "RLJob",
    "RLJobSpec",
    "RLJobStatus",
    "RolloutSpec",
    "RolloutWorkers",
    "SandboxBounds",
    "SecretKeyRef",
    "SecretRef",
    "SkipSpec",
    "Spec",
    "Tenant",
    "TenantSpec",
    "TenantStatus",
    "Toleration",
    "TrainerWorkers",
    "TrainingSpec",
    "WorkersSpec",
    "WorkersStatus",
]

"""RLJob: one reinforcement learning job of a tenant as one object (docs/architecture.md)."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from marlaas_api.kinds.agent import AgentSpec, PoolRef
from marlaas_api.kinds.base import FIXED, Kind, Spec, list_map
from marlaas_api.kinds.environment import EnvironmentSpec
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.kinds.training import CheckpointSpec, EvaluationSpec, ExportSpec, RolloutSpec, TrainingSpec
from marlaas_api.numeric import slots_needed

_TEN_YEARS_S = 315_360_000


class RLJobSpec(Spec):
    """Desired state of a job. Only steps (upwards), priority, suspend, activeDeadlineSeconds, ttlSecondsAfterFinished and backoffLimit can change."""

    pool_ref: PoolRef = Field(description="The ModelPool that serves and trains the job.", json_schema_extra=FIXED)
    agents: Annotated[tuple[AgentSpec, ...], Field(min_length=1, max_length=16)] = Field(
        (AgentSpec(name="policy"),),
        description="The policies of the job; one agent called policy by default, and no more than one in this version.",
        json_schema_extra={**list_map("name"), **FIXED},
    )
    environment: EnvironmentSpec = Field(description="What the agents learn in.", json_schema_extra=FIXED)
    rollout: RolloutSpec = Field(
        default_factory=lambda: RolloutSpec(), description="Sampling.", json_schema_extra=FIXED
    )
    training: TrainingSpec = Field(description="How the agents learn.")
    evaluation: EvaluationSpec = Field(
        default_factory=lambda: EvaluationSpec(), description="Held-out tasks.", json_schema_extra=FIXED
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=lambda: CheckpointSpec(), description="How much of the past is kept.", json_schema_extra=FIXED
    )
    export: ExportSpec = Field(
        default_factory=lambda: ExportSpec(), description="Where the promoted adapter goes.", json_schema_extra=FIXED
    )
    adapter_retention: Literal["keep", "delete"] = Field(
        "keep",
        description="What becomes of the published adapter when the job is deleted; keep, because it is the job's whole result.",
        json_schema_extra=FIXED,
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="Order among those jobs of the tenant that wait for the same pool; higher goes first. It moves no job of another tenant: the queue of a "
        "pool is by creation time, and a tenant's jobs share out the tenant's own positions in it.",
    )
    suspend: bool = Field(
        False,
        description="True stops the job at once and frees what it holds; false goes on with the step that was under way.",
    )
    active_deadline_seconds: float | None = Field(
        None,
        gt=0,
        le=_TEN_YEARS_S,
        description="Longest time that the job may be admitted, in seconds; time in which it is queued or suspended is not counted. Absent: no bound.",
    )
    ttl_seconds_after_finished: float | None = Field(
        None, ge=0, le=_TEN_YEARS_S, description="Delete the object this many seconds after its end. Absent: never."
    )

    backoff_limit: int = Field(
        6,
        ge=0,
        le=1000,
        description="Crashes of sandbox pods (evictions for what they wrote included) after which the job fails; 0 fails it at the first, and 6 is what Kubernetes gives its own jobs.",
    )

    @model_validator(mode="after")
    def _agents_differ(self) -> Self:
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError("agents must have different names")
        return self

    @property
    def slots_needed(self) -> int:
        """Number of adapter slots that the job uses at once."""
        return slots_needed(len(self.agents), self.training.max_staleness)


class RLJob(Kind):
    """A tenant's whole RL run."""

    kind: Literal["RLJob"]
    spec: RLJobSpec
    status: RLJobStatus | None = Field(None, description="Written by the operator.")

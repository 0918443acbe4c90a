"""RLJob: one reinforcement learning job of a tenant as one object (docs/explanation/architecture.md)."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from marlaas_api.kinds.agent import AgentSpec, PoolRef
from marlaas_api.kinds.base import FIXED, NO_CHANGE, Kind, Spec, list_map, rules
from marlaas_api.kinds.environment import EnvironmentSpec
from marlaas_api.kinds.export import ExportSpec
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.kinds.training import CheckpointSpec, EvaluationSpec, RolloutSpec, TrainingSpec
from marlaas_api.names import export_folder, hub_repository

_TEN_YEARS_S = 315_360_000
_NAMED_AGENTS = (
    (
        "self.all(one, !has(one.policy) || self.exists(other, other.name == one.policy.of))",
        "policy.of names an agent that the job lacks; name an agent that has a policy of its own",
    ),
    (
        "self.all(one, !has(one.policy) || self.all(other, other.name != one.policy.of || !has(other.policy)))",
        "policy.of names an agent that has no policy of its own; name an agent that has one",
    ),
    (
        "self.all(one, !has(one.policy) || one.policy.versions != 'past' || "
        "self.all(other, other.name != one.policy.of || other.trainable))",
        "policy.of names an agent that is not trainable, so it has no past versions; remove versions: past",
    ),
    (
        "self.all(one, !has(one.rewardFrom) || one.rewardFrom.all(part, self.exists(other, other.name == part.agent)))",
        "rewardFrom names an agent that the job lacks; name agents of the job",
    ),
)
"""Rules about agents that other agents name, for the API server; `agent_checks` checks them with the names in its sentences."""


class RLJobSpec(Spec):
    """Desired state of a job. Only steps (upwards), priority, suspend, activeDeadlineSeconds, ttlSecondsAfterFinished and backoffLimit can change."""

    pool_ref: PoolRef = Field(
        description="The ModelPool that serves and trains the agents that name no other. Its sandbox settings hold for the job's sandboxes.",
        json_schema_extra=FIXED,
    )
    agents: Annotated[tuple[AgentSpec, ...], Field(min_length=1, max_length=16)] = Field(
        (AgentSpec(name="policy"),),
        description="Agents that play the job's episodes, each with a policy of its own. Environments call them by name.",
        json_schema_extra={**list_map("name"), **rules(*_NAMED_AGENTS, NO_CHANGE)},
    )
    environment: EnvironmentSpec = Field(
        description="Environment that plays the job's episodes.", json_schema_extra=FIXED
    )
    rollout: RolloutSpec = Field(
        default_factory=lambda: RolloutSpec(), description="Sampling of episodes.", json_schema_extra=FIXED
    )
    training: TrainingSpec = Field(description="Algorithm, loss, optimizer and data.")
    evaluation: EvaluationSpec = Field(
        default_factory=lambda: EvaluationSpec(), description="Evaluation on held-out tasks.", json_schema_extra=FIXED
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=lambda: CheckpointSpec(), description="Retention of training states.", json_schema_extra=FIXED
    )
    export: ExportSpec = Field(
        default_factory=lambda: ExportSpec(),
        description="Destinations of the promoted adapter besides the blob store, trackers that receive metrics, and receivers of messages.",
        json_schema_extra=FIXED,
    )
    adapter_retention: Literal["keep", "delete"] = Field(
        "keep",
        description="Whether the published adapter is kept or deleted when the job is deleted. Kept by default, because it is the job's result.",
        json_schema_extra=FIXED,
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="Order among the tenant's own jobs on the same pool: the highest is admitted first, and the lowest is preempted first. It never decides "
        "between tenants; their shares do.",
    )
    suspend: bool = Field(
        False,
        description="True stops the job at once and frees its adapter slots and sandboxes. False again resumes it at the step that was interrupted.",
    )
    active_deadline_seconds: float | None = Field(
        None,
        gt=0,
        le=_TEN_YEARS_S,
        description="Maximum time for which the job may be admitted, in seconds; then it fails. Time in the queue or suspended does not count. Absent: no limit.",
    )
    ttl_seconds_after_finished: float | None = Field(
        None,
        ge=0,
        le=_TEN_YEARS_S,
        description="Delete the object this many seconds after the job has finished; an upload of its adapters is waited for, at most a day. Absent: never.",
    )

    backoff_limit: int = Field(
        6,
        ge=0,
        le=1000,
        description="Number of crashes in a row of one sandbox that the job survives; one more fails it, so 0 fails it at the first. A crash counts for an hour. "
        "Evictions of sandboxes that wrote too much to disk count, and kills for exceeding the memory limit count over all sandboxes; faults of the node, evictions by it and preemptions do not. The default is that of Kubernetes' Job.",
    )

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that the job needs: its own, which bounds its sandboxes, then those of its agents."""
        return tuple(dict.fromkeys((self.pool_ref.name, *(self.pool_of(agent) for agent in self.agents))))

    def pool_of(self, agent: AgentSpec) -> str:
        """Return the name of an agent's pool: its own, or the job's; if it plays another agent's policy, that agent's."""
        owner = next((one for one in self.agents if one.name == agent.policy_name), agent)
        return owner.pool_ref.name if owner.pool_ref is not None else self.pool_ref.name

    def agents_on(self, pool: str) -> tuple[tuple[int, AgentSpec], ...]:
        """Return the agents on a pool that have a policy of their own, each with its position in `agents`."""
        return tuple(
            (at, agent) for at, agent in enumerate(self.agents) if agent.policy is None and self.pool_of(agent) == pool
        )

    @property
    def hub_repositories(self) -> tuple[str, ...]:
        """The hub's repositories to which the job's adapters are uploaded; empty without `export.hub`."""
        hub, trained = self.export.hub, self._trained
        return () if hub is None else tuple(hub_repository(hub.repo, name, len(trained)) for name in trained)

    def export_folders(self, base: str) -> tuple[str, ...]:
        """Return the folders or URLs of the job's adapters below the one of `export.s3` or `export.volume`."""
        return tuple(export_folder(base, name, len(self._trained)) for name in self._trained)

    @property
    def _trained(self) -> list[str]:
        return [one.name for one in self.agents if one.trainable and one.policy is None]

    @property
    def called_agents(self) -> tuple[str, ...]:
        """Names of the agents that environments call: all but the teacher of `distill`."""
        distillation = self.training.distillation
        teacher = None if distillation is None else distillation.teacher
        return tuple(agent.name for agent in self.agents if agent.name != teacher)

    @property
    def pinned(self) -> tuple[AgentSpec, ...]:
        """The agents that need adapter slots: each with a policy of its own, and each that plays past versions."""
        return tuple(agent for agent in self.agents if agent.policy is None or agent.policy.versions == "past")

    @model_validator(mode="after")
    def _agents_differ(self) -> Self:
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError("agents must have different names")
        return self


class RLJob(Kind):
    """One reinforcement learning job of a tenant."""

    kind: Literal["RLJob"]
    spec: RLJobSpec
    status: RLJobStatus | None = Field(None, description="Observed state; written by the operator.")

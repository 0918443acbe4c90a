"""The status that the operator writes. Readers ignore unknown fields, so that old readers can read newer statuses."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from marlaas_api.kinds.base import DnsLabel, list_map, matching

_Text = Annotated[str, StringConstraints(max_length=32768)]
_Reason = Annotated[str, matching(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "a word like WaitingForSlots", 1024)]
_Name = Annotated[str, StringConstraints(max_length=253)]
_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
_Figures = Annotated[str, StringConstraints(max_length=64)]
_Count = Annotated[int, Field(ge=0)]


CONDITIONS: dict[str, dict[str, str]] = {
    "RLJob": {
        "Admitted": "The orchestrator has given the job its adapter slots; until then it is queued, and the reason says what for.",
        "SandboxReady": "A sandbox plays its episodes.",
        "Complete": "The job has done its steps, and its adapter is published. Final.",
        "Failed": "The job has ended without that. Final.",
    },
    "ModelPool": {
        "RolloutReady": "Every engine serves.",
        "TrainerReady": "Every trainer serves.",
        "Ready": "The pool serves jobs.",
        "Deleting": "The pool is going; False with reason InUse while jobs need it.",
    },
    "Tenant": {"Active": "Its namespaces are its own; False while another Tenant claims one of them."},
}
"""Types of conditions that each kind has, and what True means."""


class Status(BaseModel):
    """A part of a status: camelCase keys; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True, extra="ignore"
    )


class Condition(Status):
    """One aspect of an object's state, as Kubernetes' own conditions."""

    type: Annotated[str, StringConstraints(max_length=316)] = Field(description="Which aspect, for example Admitted.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the aspect holds.")
    reason: _Reason = Field(description="Why, as one word for machines.")
    message: _Text = Field("", description="Why, and what to do, for people.")
    last_transition_time: _Time = Field(description="When `status` last changed.")
    observed_generation: _Count | None = Field(None, description="Generation of the spec that this was said of.")


class ObjectStatus(Status):
    """Status fields that every kind has."""

    observed_generation: _Count | None = Field(None, description="Generation of the spec that this status answers.")
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32)] = Field(
        (), description="Aspects with their reasons; docs/api.md lists the types.", json_schema_extra=list_map("type")
    )


class AgentStatus(Status):
    """One agent of a job."""

    name: DnsLabel = Field(description="Name of the agent.")
    policy_version: _Count | None = Field(None, description="Newest committed version; 0 is the initial one.")
    promoted_version: _Count | None = Field(None, description="Version that the succeeded job publishes.")
    adapter: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="Where the newest published adapter lies."
    )


class RLJobStatus(ObjectStatus):
    """Progress of a job. Rewards are means over episodes; evaluations are on held-out tasks."""

    phase: Literal["Queued", "Running", "Suspended", "Succeeded", "Failed"] | None = Field(
        None,
        description="Where the job is; the last two are final, but a succeeded job that is given more steps goes on.",
    )
    reason: _Reason | None = Field(None, description="Why it is there, as one word; docs/reasons.md has them all.")
    message: _Text | None = Field(None, description="What is going on and what to do.")
    tenant: _Name | None = Field(None, description="Tenant that the job counts for: a Tenant, or else its namespace.")
    progress: _Figures | None = Field(None, description="step/steps, for people.")
    step: _Count | None = Field(None, description="Finished steps, steps without signal included.")
    steps: _Count | None = Field(None, description="Steps to do.")
    agents: Annotated[tuple[AgentStatus, ...], Field(max_length=64)] = Field(
        (), description="Per agent: its version and where its adapter lies.", json_schema_extra=list_map("name")
    )
    reward: float | None = Field(None, description="Mean reward of the last step.")
    eval_before: float | None = Field(None, description="Mean reward on held-out tasks at version 0.")
    eval_last: float | None = Field(None, description="Mean reward on held-out tasks at the newest evaluated version.")
    staleness: float | None = Field(None, description="Mean versions that the last step's groups were behind.")
    tokens: _Count | None = Field(None, description="Generated tokens in all.")
    tokens_per_second: float | None = Field(None, description="Generated tokens per second, lately.")
    accelerator_seconds: float | None = Field(None, description="Seconds of engine and trainer time in all.")
    faults: Annotated[dict[Annotated[str, StringConstraints(max_length=63)], _Count], Field(max_length=32)] | None = (
        Field(
            None,
            description="Plays that did not count, by class: infra, env; waited: turns waited for an hour, and the episode was played again.",
        )
    )
    training_faults: (
        Annotated[dict[Annotated[str, StringConstraints(max_length=63)], _Count], Field(max_length=32)] | None
    ) = Field(
        None,
        description="What went wrong in training and cost no step, by class. out-of-memory: steps done anew with half of microbatchTokens. non-finite: "
        "gradients that were NaN or infinite, after which the weights stayed as they were; several in a row fail the job.",
    )
    sandbox_crashes: _Count | None = Field(
        None, description="Crashes of the job's sandbox pods; see spec.backoffLimit."
    )
    started_at: _Time | None = Field(None, description="When the job was first admitted.")
    finished_at: _Time | None = Field(None, description="When the job reached a final phase.")


class WorkersStatus(Status):
    """Workers of one role."""

    replicas: _Count | None = Field(None, description="Workers that exist.")
    ready: _Count | None = Field(None, description="Workers that serve.")


class ModelPoolStatus(ObjectStatus):
    """Workers, jobs and adapter slots of a pool."""

    model: Annotated[str, StringConstraints(max_length=4352)] | None = Field(
        None, description="The base model, for people."
    )
    rollout: WorkersStatus | None = Field(None, description="The engines.")
    trainer: WorkersStatus | None = Field(None, description="The trainers.")
    rollout_ready: _Figures | None = Field(None, description="Engines that serve / engines wanted, for people.")
    trainer_ready: _Figures | None = Field(None, description="Trainers that serve / trainers wanted, for people.")
    jobs: _Count | None = Field(None, description="Admitted jobs.")
    slots: _Figures | None = Field(
        None, description="Adapter slots that admitted jobs hold / slots of one engine, for people."
    )
    free_slots: _Count | None = Field(None, description="Adapter slots that no admitted job holds.")


class TenantStatus(ObjectStatus):
    """Current usage of a tenant."""

    jobs: _Count | None = Field(None, description="Admitted jobs.")
    queued: _Count | None = Field(None, description="Jobs that wait.")
    adapter_slots: _Count | None = Field(None, description="Adapter slots that its jobs hold.")
    tokens_per_second: float | None = Field(None, description="Generated tokens per second, averaged.")
    storage_bytes: _Count | None = Field(
        None, description="Bytes of adapters and checkpoints. This version does not measure it: always absent."
    )


def unix_seconds(time: str | None) -> float | None:
    """Parse a Kubernetes time to unix seconds; None for None."""
    return None if time is None else datetime.fromisoformat(time).timestamp()

"""The status that the operator writes. Readers ignore unknown fields, so that old readers can read newer statuses."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from marlaas_api.kinds.base import DnsLabel, list_map, matching

_Text = Annotated[str, StringConstraints(max_length=32768)]
_Reason = Annotated[
    str, matching(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "a CamelCase word, for example WaitingForSlots", 1024)
]
_Name = Annotated[str, StringConstraints(max_length=253)]
_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)]
_Figures = Annotated[str, StringConstraints(max_length=64)]
_Count = Annotated[int, Field(ge=0)]


CONDITIONS: dict[str, dict[str, str]] = {
    "RLJob": {
        "Admitted": "The orchestrator has admitted the job to its pool. While False, the reason says why: the job is queued, suspended, being deleted, or has ended.",
        "SandboxReady": "The job's sandbox pods are ready.",
        "Reporting": "The job's trackers, webhooks and uploads (spec.export) have what it has made so far. False with the time since which one takes nothing; the job goes on.",
        "Healthy": "The figures of the last step and evaluation are within their bounds. It is there from the first warning on.",
        "Complete": "The job has finished all steps, and its adapter is published. Final.",
        "Failed": "The job has failed. Final.",
    },
    "ModelPool": {
        "RolloutReady": "All engines are ready.",
        "TrainerReady": "All trainers are ready.",
        "Ready": "The pool accepts jobs.",
        "Deleting": "The pool is being deleted. False with reason InUse while unfinished jobs use it.",
    },
    "Tenant": {"Active": "All of its namespaces belong to it; no older Tenant claims one."},
}
"""Types of conditions that each kind has, and the meaning of True."""


class Status(BaseModel):
    """A part of a status: camelCase keys; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True, extra="ignore"
    )


class Condition(Status):
    """One aspect of an object's state, in the format of Kubernetes conditions."""

    type: Annotated[str, StringConstraints(max_length=316)] = Field(
        description="Aspect of the object's state, for example Admitted."
    )
    status: Literal["True", "False", "Unknown"] = Field(
        description="True if the condition holds, False if not, Unknown if not known."
    )
    reason: _Reason = Field(
        description="Reason for the status, as one CamelCase word; docs/reference/reasons.md lists all."
    )
    message: _Text = Field("", description="Reason for the status and advice, as a sentence.")
    last_transition_time: _Time = Field(description="Time at which `status` last changed.")
    observed_generation: _Count | None = Field(
        None, description="metadata.generation of the spec for which the condition was computed."
    )


class ObjectStatus(Status):
    """Status fields that every kind has."""

    observed_generation: _Count | None = Field(
        None, description="metadata.generation of the spec for which this status was computed."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=32)] = Field(
        (),
        description="Conditions with their reasons; docs/reference/api.md lists the types.",
        json_schema_extra=list_map("type"),
    )


class UsageStatus(Status):
    """Total usage. Each generated token counts under exactly one of the uses trained to unrecorded. Absent: 0."""

    prompt_tokens: int | None = Field(None, description="Number of tokens of all prompts, each turn's whole prompt.")
    cached_tokens: int | None = Field(
        None, description="Number of these tokens that the engines took from their prefix cache."
    )
    generated_tokens: int | None = Field(None, description="Number of generated tokens, the sum of the following ones.")
    trained_tokens: int | None = Field(None, description="Number of tokens of groups that were trained.")
    evaluation_tokens: int | None = Field(None, description="Number of tokens of held-out tasks.")
    zero_variance_tokens: int | None = Field(
        None,
        description="Number of tokens of groups whose members all had the same reward, or of which fewer than two counted.",
    )
    stale_tokens: int | None = Field(None, description="Number of tokens of groups that were too stale to train.")
    failed_tokens: int | None = Field(None, description="Number of tokens of episodes that ended with a fault.")
    repeated_tokens: int | None = Field(
        None, description="Number of tokens of further plays of the same member of a group."
    )
    frozen_tokens: int | None = Field(
        None, description="Number of tokens of agents that are not trained, in training groups."
    )
    preempted_tokens: int | None = Field(
        None, description="Number of tokens of plays that a preemption of their job cut. They are not charged."
    )
    open_tokens: int | None = Field(
        None, description="Number of tokens that no finished step or evaluation has counted yet."
    )
    unrecorded_tokens: int | None = Field(
        None, description="Number of tokens that were still open when their job ended or was deleted."
    )
    wasted_tokens: int | None = Field(
        None, description="Sum of zero-variance, stale, failed, repeated and unrecorded tokens."
    )
    engine_seconds: float | None = Field(
        None, description="Seconds of the engines; the time of a batch is shared among its requests."
    )
    preempted_engine_seconds: float | None = Field(
        None, description="Seconds of these for plays that a preemption of their job cut. They are not charged."
    )
    trainer_seconds: float | None = Field(None, description="Seconds that trainers computed.")
    sandbox_seconds: float | None = Field(
        None, description="Seconds that episodes took in sandboxes, waiting included, as the sandboxes report them."
    )
    slot_seconds: float | None = Field(
        None,
        description="Seconds for which versions of adapters had slots of an engine while their jobs were admitted, summed over the slots.",
    )
    admitted_seconds: float | None = Field(None, description="Seconds for which jobs were admitted.")
    stored_bytes: int | None = Field(
        None, description="Bytes of all versions of adapters and of the kept training states."
    )


class AgentStatus(Status):
    """One agent of a job."""

    name: DnsLabel = Field(description="Name of the agent.")
    policy_version: _Count | None = Field(
        None, description="Newest committed policy version; 0 is the initial adapter."
    )
    promoted_version: _Count | None = Field(None, description="Version that the succeeded job has published.")
    adapter: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="Location of the newest published adapter in the blob store."
    )
    reward: float | None = Field(None, description="Mean reward of the agent in the last step.")
    eval_before: float | None = Field(None, description="Mean reward of the agent on held-out tasks at version 0.")
    eval_last: float | None = Field(None, description="Newest mean reward of the agent on held-out tasks.")
    staleness: float | None = Field(
        None, description="Mean staleness of the agent's groups in the last step, in versions."
    )
    untrained_steps: (
        Annotated[dict[Annotated[str, StringConstraints(max_length=63)], _Count], Field(max_length=32)] | None
    ) = Field(
        None,
        description="Number of finished steps that trained no token of the agent and made no version, by cause: `flat`, `out-of-turns`, `faulted`, `uncalled`, `stale`, `filtered`, `empty` or `masked`.",
    )
    usage: UsageStatus | None = Field(
        None,
        description="Usage of the agent in finished steps and evaluations, with the seconds of its slots and its stored bytes. The time of admission is known for the job only.",
    )


class SuiteStatus(Status):
    """Results of one suite of the evaluation."""

    name: Annotated[str, StringConstraints(max_length=40)] = Field(description="Name of the suite.")
    before: float | None = Field(None, description="Mean reward at version 0.")
    last: float | None = Field(None, description="Mean reward at the newest evaluated version.")
    standard_error: float | None = Field(None, description="Standard error of `last`, over the means of the tasks.")
    pass_at: Annotated[dict[Annotated[str, StringConstraints(max_length=5)], float], Field(max_length=16)] | None = (
        Field(None, description="By k, the probability that one of k samples of a task is solved (unbiased estimate).")
    )
    majority: float | None = Field(None, description="Mean reward of each task's most frequent answer.")


class TrackerStatus(Status):
    """A tracker that receives the job's metrics, or the hub."""

    name: Annotated[str, StringConstraints(max_length=63)] = Field(description="Name of the tracker, or hub.")
    url: Annotated[str, StringConstraints(max_length=1024)] = Field(
        description="Address of the job's run there; of the hub the adapter's repository, or its owner if the job has several."
    )


class RLJobStatus(ObjectStatus):
    """Progress of a job. Rewards are means over episodes; evaluations use held-out tasks."""

    phase: Literal["Queued", "Running", "Suspended", "Succeeded", "Failed"] | None = Field(
        None,
        description="Phase of the job. Succeeded and Failed are final, but raising spec.training.steps of a succeeded job continues it.",
    )
    reason: _Reason | None = Field(
        None, description="Reason for the phase, as one CamelCase word; docs/reference/reasons.md lists all."
    )
    message: _Text | None = Field(None, description="Current state of the job and advice, as a sentence.")
    tenant: _Name | None = Field(
        None,
        description="Tenant to which the job is accounted: the name of a Tenant, or `tenant/default` if no Tenant has the job's namespace.",
    )
    progress: _Figures | None = Field(None, description="`step`/`steps` as text, for kubectl's table.")
    step: _Count | None = Field(None, description="Number of finished steps, including steps without signal.")
    steps: _Count | None = Field(None, description="Total number of steps of the job.")
    agents: Annotated[tuple[AgentStatus, ...], Field(max_length=64)] = Field(
        (), description="Version, adapter, rewards and usage of each agent.", json_schema_extra=list_map("name")
    )
    versions: _Figures | None = Field(
        None,
        description="Newest versions of the job's policies, in the order of `agents`, as text for kubectl's table: `12`, `12/11`; of many the lowest and highest: `9-12`.",
    )
    reward: float | None = Field(
        None,
        description="Mean reward of the last step. With several agents, here and in evaluations, an episode's reward is the mean over its trained agents.",
    )
    eval_before: float | None = Field(None, description="Mean reward on held-out tasks at version 0.")
    eval_last: float | None = Field(None, description="Mean reward on held-out tasks at the newest evaluated version.")
    suites: Annotated[tuple[SuiteStatus, ...], Field(max_length=16)] | None = Field(
        None,
        description="Results of the evaluation's suites at the newest evaluated version.",
        json_schema_extra=list_map("name"),
    )
    staleness: float | None = Field(None, description="Mean staleness of the last step's groups, in versions.")
    tokens: _Count | None = Field(None, description="Total number of generated tokens.")
    tokens_per_second: float | None = Field(None, description="Recent rate of generated tokens per second.")
    accelerator_seconds: float | None = Field(None, description="Total engine time, in seconds.")
    usage: UsageStatus | None = Field(None, description="Total usage of the job, all agents together.")
    faults: Annotated[dict[Annotated[str, StringConstraints(max_length=63)], _Count], Field(max_length=32)] | None = (
        Field(
            None,
            description="Number of discarded attempts at episodes, by class. env: fault of the environment. infra: fault of the platform. waited: a turn "
            "waited for an hour, and the episode was played again.",
        )
    )
    training_faults: (
        Annotated[dict[Annotated[str, StringConstraints(max_length=63)], _Count], Field(max_length=32)] | None
    ) = Field(
        None,
        description="Number of faults in training that cost no step, by class. out-of-memory: steps repeated with half of microbatchTokens. non-finite: "
        "updates whose gradient was NaN or infinite and that left the weights unchanged; the third in a row fails the job.",
    )
    trackers: Annotated[tuple[TrackerStatus, ...], Field(max_length=16)] | None = Field(
        None,
        description="Where the trackers of spec.export show the job, and where the hub has its adapter (`hub`), as the pod reports it that sends to them.",
        json_schema_extra=list_map("name"),
    )
    sandbox_crashes: _Count | None = Field(
        None,
        description="Crashes in a row of the sandbox that crashes most, or kills for memory of all sandboxes; see spec.backoffLimit.",
    )
    started_at: _Time | None = Field(None, description="Time at which the job was first admitted.")
    finished_at: _Time | None = Field(None, description="Time at which the job reached a final phase.")


class WorkersStatus(Status):
    """Workers of one role."""

    replicas: _Count | None = Field(None, description="Number of workers that exist.")
    ready: _Count | None = Field(None, description="Number of workers that are ready.")
    start_seconds: float | None = Field(
        None, description="Seconds until all workers were ready, the last time that they were not."
    )


class ModelPoolStatus(ObjectStatus):
    """Workers, jobs and adapter slots of a pool."""

    model: Annotated[str, StringConstraints(max_length=4352)] | None = Field(
        None, description="Source of the base model as text, for kubectl's table."
    )
    rollout: WorkersStatus | None = Field(None, description="Number of engines.")
    trainer: WorkersStatus | None = Field(None, description="Number of trainers.")
    rollout_ready: _Figures | None = Field(
        None, description="Ready engines / desired engines as text, for kubectl's table."
    )
    trainer_ready: _Figures | None = Field(
        None, description="Ready trainers / desired trainers as text, for kubectl's table."
    )
    jobs: _Count | None = Field(None, description="Number of admitted jobs.")
    slots: _Figures | None = Field(
        None,
        description="Agents of admitted jobs / agents that the pool admits (adapterSlots x replicas x agentsPerSlot) as text, for kubectl's table.",
    )
    free_slots: _Count | None = Field(
        None, description="Number of agents that the pool admits beside those of admitted jobs."
    )


class TenantStatus(ObjectStatus):
    """Current usage of a tenant."""

    jobs: _Count | None = Field(None, description="Number of the tenant's admitted jobs.")
    queued: _Count | None = Field(None, description="Number of the tenant's queued jobs.")
    adapter_slots: _Count | None = Field(None, description="Number of agents of the tenant's admitted jobs.")
    share_entitled: float | None = Field(
        None,
        description="Share of the pools to which the weight entitles the tenant while it has jobs: its weight / the weights of all tenants that have jobs.",
    )
    share_held: float | None = Field(
        None, description="Largest share that the agents of the tenant's admitted jobs have of any pool."
    )
    tokens_per_second: float | None = Field(None, description="Generated tokens per second, averaged.")
    storage_bytes: _Count | None = Field(
        None, description="Bytes of all versions of adapters and of the kept training states of the tenant's jobs."
    )
    usage: UsageStatus | None = Field(
        None, description="Total usage of the tenant's jobs, deleted ones included. Updated every ten seconds."
    )
    deleted_usage: UsageStatus | None = Field(None, description="The part of `usage` that deleted jobs have.")
    usage_history: str | None = Field(
        None,
        description="ConfigMap with the total usage of every hour, as `namespace/name`. `kubectl marlaas usage --since DATE` reads it.",
    )


def unix_seconds(time: str | None) -> float | None:
    """Parse a Kubernetes time to unix seconds; None for None."""
    return None if time is None else datetime.fromisoformat(time).timestamp()

"""Every message between workers, as frozen pydantic models.

Writers (docs/explanation/architecture.md):

- The orchestrator writes Task, the entries of a job's log (JobLogEntry), StepRecord, EvalRecord, Progress, TenantUsage, and the
  pins of strict and evaluation groups.
- A sandbox writes GenerateRequest and Episode. Of what it writes, only rewards affect accounting or gradients.
- A rollout worker writes GenerateReply, Turn and the other pins.
- A trainer writes PolicyRecord and Manifest.
- An exporter writes ExportReport and AdapterRequest, which the orchestrator answers with AdapterPart.
"""

from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.episodes import Choice, Ending, Episode, FaultClass, TurnReward
from marlaas_api.messages.exports import AdapterFile, AdapterPart, AdapterRequest, DestinationReport, ExportReport
from marlaas_api.messages.groups import (
    AgentClosed,
    DataPosition,
    EvaluationBegun,
    GroupDecided,
    GroupOutcome,
    GroupReady,
    GroupResolution,
    GroupUnused,
    IssueEntry,
    IssueLedger,
    JobLogEntry,
    StepClosed,
    TasksIssued,
    TrajectoryRef,
)
from marlaas_api.messages.job_spec import JobSpec
from marlaas_api.messages.jobs import (
    AgentProgress,
    JobAgent,
    JobDocument,
    JobEvent,
    JobHold,
    JobVerdict,
    PastUses,
    Phase,
    Progress,
    SuiteProgress,
    TenantQuota,
    agents_on,
    concerns_loop,
)
from marlaas_api.messages.plays import GroupPlays, Lengths, StepPlays
from marlaas_api.messages.policies import Manifest, PolicyRecord, Probe, UntrainedStep
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_api.messages.pools import AdaptedLayer, Calibration, JobWait, PoolDocument, ReplicaReport, SelfTestSpec
from marlaas_api.messages.steps import (
    AgentStep,
    Difficulty,
    EvalRecord,
    EvalSample,
    StepOutcome,
    StepRecord,
    SuiteResult,
    TaskOutcome,
    UntrainedCause,
)
from marlaas_api.messages.tasks import Pin, TaskMessage
from marlaas_api.messages.turns import (
    CancelRequest,
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    KeepRequest,
    Meter,
    ReplyPartsMessage,
    ReplyPhase,
    ToolCallMessage,
    Turn,
)
from marlaas_api.messages.usage import TenantUsage, TokenUse, UsageAmounts
from marlaas_api.names import StopReason

__all__ = [
    "AdaptedLayer",
    "AdapterFile",
    "AdapterPart",
    "AdapterRequest",
    "AgentClosed",
    "AgentProgress",
    "AgentStep",
    "BusMessage",
    "Calibration",
    "CancelRequest",
    "ChatMessage",
    "Choice",
    "DataPosition",
    "DestinationReport",
    "Difficulty",
    "Ending",
    "Episode",
    "EvalRecord",
    "EvalSample",
    "EvaluationBegun",
    "ExportReport",
    "FaultClass",
    "GenerateReply",
    "GenerateRequest",
    "GroupDecided",
    "GroupOutcome",
    "GroupPlays",
    "GroupReady",
    "GroupResolution",
    "GroupUnused",
    "IssueEntry",
    "IssueLedger",
    "JobAgent",
    "JobDocument",
    "JobEvent",
    "JobHold",
    "JobLogEntry",
    "JobMessage",
    "JobSpec",
    "JobVerdict",
    "JobWait",
    "KeepRequest",
    "Lengths",
    "Manifest",
    "Meter",
    "PastUses",
    "Phase",
    "Pin",
    "PolicyRecord",
    "PoolDocument",
    "PoolSpec",
    "Probe",
    "Progress",
    "ReplicaReport",
    "ReplyPartsMessage",
    "ReplyPhase",
    "SelfTestSpec",
    "StepClosed",
    "StepOutcome",
    "StepPlays",
    "StepRecord",
    "StopReason",
    "SuiteProgress",
    "SuiteResult",
    "TaskMessage",
    "TaskOutcome",
    "TasksIssued",
    "TenantQuota",
    "TenantUsage",
    "TokenUse",
    "ToolCallMessage",
    "TrajectoryRef",
    "Turn",
    "TurnReward",
    "UntrainedCause",
    "UntrainedStep",
    "UsageAmounts",
    "agents_on",
    "concerns_loop",
]

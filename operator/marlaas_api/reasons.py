"""The reasons that statuses, conditions and Kubernetes events may give: one word each, the same everywhere.

Code that reports a reason uses `Reason`; `marlaas_api.reason_texts` has the meaning and advice for people. No other
reason may be written into an object: tests check the code that emits reasons.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Reasons as CamelCase words for machines; stable, because users write alerts on them."""

    # Normal stages of a job.
    WAITING_FOR_ORCHESTRATOR = "WaitingForOrchestrator"
    ADMITTED = "Admitted"
    SANDBOX_STARTING = "SandboxStarting"
    SANDBOX_READY = "SandboxReady"
    WAITING_FOR_TRAINER = "WaitingForTrainer"
    WAITING_FOR_BUS_SPACE = "WaitingForBusSpace"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    FINISHED = "Finished"
    SUSPENDED = "Suspended"
    DELETING = "Deleting"

    # Before admission.
    NOT_ADMITTED = "NotAdmitted"
    POOL_NOT_FOUND = "PoolNotFound"
    WAITING_FOR_POOL = "WaitingForPool"
    WAITING_FOR_SLOTS = "WaitingForSlots"
    WAITING_FOR_MEMORY = "WaitingForMemory"
    OVER_QUOTA = "OverQuota"
    TENANT_REQUIRED = "TenantRequired"
    PREEMPTED = "Preempted"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    NEVER_FITS = "NeverFits"
    EGRESS_NOT_ALLOWED = "EgressNotAllowed"

    # Specs that can run in no pool.
    UNSUPPORTED = "Unsupported"

    # Faults of pods, the bus and stored objects; they end by themselves when their cause is removed.
    BUS_UNAVAILABLE = "BusUnavailable"
    STORE_SILENT = "StoreSilent"
    STORE_FULL = "StoreFull"
    STORE_REFUSED = "StoreRefused"
    UNREADABLE = "Unreadable"
    IMAGE_CANNOT_BE_PULLED = "ImageCannotBePulled"
    POD_UNSCHEDULABLE = "PodUnschedulable"
    POD_REFUSED = "PodRefused"
    CONFIG_MISSING = "ConfigMissing"
    MODEL_NOT_FOUND = "ModelNotFound"
    CONTAINER_CRASHING = "ContainerCrashing"
    CONTAINER_OUT_OF_MEMORY = "ContainerOutOfMemory"
    INVALID_SPEC = "InvalidSpec"
    RECOVERED = "Recovered"

    # Figures of a job that are out of their bounds (condition Healthy).
    HEALTHY = "Healthy"
    EVALUATION_OVERLAP = "EvaluationOverlap"
    REPLIES_CUT = "RepliesCut"
    NO_SIGNAL = "NoSignal"
    MIXED_GROUPS = "MixedGroups"
    ONE_PROMPT = "OnePrompt"
    ENGINE_MISMATCH = "EngineMismatch"

    # Reports of a job to trackers and webhooks (condition Reporting).
    REPORTING = "Reporting"
    EXPORTER_STARTING = "ExporterStarting"
    UPLOADING = "Uploading"
    REPORT_DELAYED = "ReportDelayed"

    # Failures of a job; final.
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INVALID_ENVIRONMENT = "InvalidEnvironment"
    TOO_MANY_FAULTS = "TooManyFaults"
    TRAINING_FAILED = "TrainingFailed"
    BROKEN_INVARIANT = "BrokenInvariant"

    # Reasons of pools and tenants.
    ROLLOUT_STARTING = "RolloutStarting"
    TRAINER_STARTING = "TrainerStarting"
    ROLLOUT_READY = "RolloutReady"
    TRAINER_READY = "TrainerReady"
    READY = "Ready"
    IN_USE = "InUse"
    ACTIVE = "Active"
    CONFLICTING_TENANTS = "ConflictingTenants"

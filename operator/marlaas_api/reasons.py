"""The reasons that a status, a condition or a Kubernetes event of ours may give: one word each, the same everywhere.

`Reason` is for whoever says one; `marlaas_api.reason_texts` tells people what it means and what to do. No other reason may be written into an
object: the tests read the emitters.
"""

from enum import StrEnum


class Reason(StrEnum):
    """CamelCase words for machines; stable, because people write alerts on them."""

    # What every job goes through.
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

    # What a job waits for before it is admitted.
    NOT_ADMITTED = "NotAdmitted"
    POOL_NOT_FOUND = "PoolNotFound"
    WAITING_FOR_POOL = "WaitingForPool"
    WAITING_FOR_SLOTS = "WaitingForSlots"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    NEVER_FITS = "NeverFits"
    UNSUPPORTED_AGENTS = "UnsupportedAgents"

    # What can never run as it is written, in any pool.
    UNSUPPORTED = "Unsupported"

    # What goes wrong with pods, the bus and stored objects; it goes away by itself once the cause does.
    BUS_UNAVAILABLE = "BusUnavailable"
    IMAGE_CANNOT_BE_PULLED = "ImageCannotBePulled"
    POD_UNSCHEDULABLE = "PodUnschedulable"
    POD_REFUSED = "PodRefused"
    CONFIG_MISSING = "ConfigMissing"
    MODEL_NOT_FOUND = "ModelNotFound"
    CONTAINER_CRASHING = "ContainerCrashing"
    CONTAINER_OUT_OF_MEMORY = "ContainerOutOfMemory"
    INVALID_SPEC = "InvalidSpec"
    RECOVERED = "Recovered"

    # What ends a job as Failed.
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    TOO_MANY_FAULTS = "TooManyFaults"
    TRAINING_FAILED = "TrainingFailed"
    BROKEN_INVARIANT = "BrokenInvariant"

    # What pools and tenants say.
    ROLLOUT_STARTING = "RolloutStarting"
    TRAINER_STARTING = "TrainerStarting"
    ROLLOUT_READY = "RolloutReady"
    TRAINER_READY = "TrainerReady"
    READY = "Ready"
    IN_USE = "InUse"
    ACTIVE = "Active"
    CONFLICTING_TENANTS = "ConflictingTenants"

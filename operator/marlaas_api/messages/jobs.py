"""A job as the operator, the local runner and the orchestrator tell each other of it: what to run, how it goes, its story."""

from enum import StrEnum

from pydantic import Field

from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages.base import BusMessage, JobMessage


class JobVerdict(BusMessage):
    """Why a job cannot go on, found by who looks after its pods. reason: CamelCase, for machines; message: for people, with what to do."""

    reason: str
    message: str


class JobDocument(JobMessage):
    """What to run; KV `jobs`. The operator or `marlaas run` writes it, every worker re-reads it.

    created_at: unix seconds; the queue is by this time. 0 in documents of older writers, which therefore go first. `deleted` asks the orchestrator to stop the job and forget it: it removes this key last. `verdict` asks it to end the job as failed.
    """

    generation: int = 1
    created_at: float = 0.0
    pool: str
    tenant: str
    tenant_weight: float = 1.0
    seed: int = 0
    spec: RLJobSpec
    deleted: bool = False
    verdict: JobVerdict | None = None


class Phase(StrEnum):
    """Where a job is. The last two are final."""

    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Nothing more will happen to the job."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Progress(JobMessage):
    """KV `progress`: the level, last value wins; the orchestrator writes, the operator or `marlaas run` reads.

    reason: CamelCase, for machines; message: what is going on and what to do, for people. step: finished steps. promoted: per agent, the
    version that a succeeded job publishes. adapters: per agent, the folder in the blob store of its newest version, or of the promoted one.
    admitted_s: seconds that the job has been admitted in all.
    skipped_*: visits to tasks that rested, because they were always right or always wrong. training_faults: what went wrong in training and cost no step,
    by class: `out-of-memory`, steps begun anew with a lower token budget; `non-finite`, versions without an update.
    """

    generation: int = 1
    phase: Phase
    admitted: bool
    reason: str
    message: str = ""
    step: int = 0
    steps: int
    versions: dict[str, int] = Field(default_factory=dict)
    promoted: dict[str, int] = Field(default_factory=dict)
    adapters: dict[str, str] = Field(default_factory=dict)
    reward: float | None = None
    eval_before: float | None = None
    eval_last: float | None = None
    staleness: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    accelerator_s: float = 0.0
    num_outstanding: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    training_faults: dict[str, int] = Field(default_factory=dict)
    started_at: float | None = None
    admitted_s: float = 0.0
    finished_at: float | None = None
    at: float = 0.0


class JobEvent(JobMessage):
    """A sentence for `describe`; EVENTS. Nothing depends on it."""

    role: str
    at: float
    reason: str
    message: str

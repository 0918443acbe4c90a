"""One agent of a job on a trainer: everything that the trainer keeps of it, why its training failed, and what all agents share.

A fault of the job is reported as such, and the job fails once all trainers report it. A fault of the trainer or of the
bus is not the job's: the agent is tried again, here or on another trainer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from marlaas_api.bus import BusRefused
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.messages import Calibration
from marlaas_api.retries import patiently
from marlaas_worker.devices import OutOfMemory
from marlaas_worker.metrics import Sample, of_job
from marlaas_worker.reporter import EventEmitter
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.assignment import Assignment, RecentWork
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.compute_queue import ComputeAccount
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.room import AgentMemory, AgentRoom
from marlaas_worker.trainer.versions import AgentLease, VersionCache
from marlaas_worker.trainer.view import PolicyEntry

T = TypeVar("T")
KEPT_S = 60.0
"""Seconds for which an agent is kept after its job's document is gone, so that the last values in the trainer's report are read."""


@dataclass(frozen=True, slots=True)
class AgentFault:
    """A failure of an agent's training, after which this trainer does not train the agent for a while."""

    version: int
    """The agent's committed version at the fault."""
    until: float
    """Unix seconds at which the trainer may train the agent again."""
    reason: str
    """Reason of the event that reports it, for example `TrainingFailed`."""
    text: str
    """Sentences for people, in the event and the report: the error, and what the job's owner can do."""

    @property
    def is_the_jobs(self) -> bool:
        """Whether another trainer would fail in the same way."""
        return self.reason == "TrainingFailed"


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals in seconds."""

    report_s: float = 2.0
    """Between two reports of the trainer."""
    reconcile_s: float = 3.0
    """Longest time between two reconciles of the trainer; changes of cached buckets cause earlier ones."""
    retry_s: float = 1.0
    """Between a failed call to the bus or the blob store and its repetition."""
    missing_turn_s: float = 60.0
    """From the first read that does not find a turn until the turn counts as lost."""
    fault_s: float = 60.0
    """Between the failure of an agent's training and the next attempt on this trainer."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainerDependencies:
    """Dependencies that all agents of one trainer share.

    Attributes:
        context: bus, blob store, clock and name of the trainer's process.
        model: the pool's base model, to which the agents' adapters are attached.
        compute: the one thread that uses torch.
        timing: intervals and timeouts.
        calibration: the pool's probes, and the noise of its model's logprobs from rounding.
        memory: sizes, in bytes, of the memory for agents.
        room: decides which agents are in that memory.
        versions: cache of the agents' newest versions, from which parked agents are restored.
    """

    context: RoleContext
    model: BaseModel
    compute: Compute
    timing: Timing
    calibration: Calibration
    memory: AgentMemory = field(default_factory=AgentMemory)
    room: AgentRoom = field(default_factory=AgentRoom)
    versions: VersionCache = field(default_factory=VersionCache)


@dataclass(slots=True, eq=False)
class Binding:
    """An agent's bind, from the compare-and-set of its policy key until its task ends."""

    lease: AgentLease
    """The policy record that this trainer wrote last."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to wake the agent's task: a message has arrived, there is room in the memory, or the agent has to leave."""
    is_leaving: bool = False
    """Whether the agent is released at its next step boundary, so that another trainer goes on."""
    is_releasing: bool = False
    """Whether the task has begun to release the agent's resources."""

    def leave(self) -> None:
        """Let the agent be released at its next step boundary. This cannot be revoked.

        If it could be revoked, the placement would keep the other agents here once the first of several has left.
        """
        self.is_leaving = True
        self.changed.set()


@dataclass(slots=True, eq=False)
class TrainedAgent:
    """Everything that a trainer keeps of one agent of one job. It is dropped as a whole, KEPT_S after the job's document."""

    shared: TrainerDependencies
    assignment: Assignment
    """Assignment of the present or last task."""
    work: RecentWork
    """Recent seconds of computation and of being bound, which the placement of agents on trainers uses."""
    account: ComputeAccount = field(init=False)
    """Account to which the agent's work on the compute thread is charged."""
    seen_at: float = 0.0
    """Time at which the job last had a document, in Unix seconds."""

    task: asyncio.Task[None] | None = None
    """Binds and trains the agent; None while this trainer does not."""
    binding: Binding | None = None
    """The bind of the task; None while the agent is not bound."""
    is_unwanted: bool = False
    """Whether the job no longer wants the agent to be trained."""
    fault: AgentFault | None = None
    """Why the last task failed; None once the agent is tried again, or its training is edited."""

    is_cleaning: bool = False
    """Whether a task other than `task` is releasing the agent's lease, or cleaning up after the agent."""
    is_cleaned: bool = False
    """Whether the job has ended, and this trainer has deleted the agent's consumer and unreferenced blobs."""

    num_commits: int = 0
    """Committed versions. This counter and those below count since the process started."""
    num_out_of_memory: int = 0
    """Steps restarted with a lower token budget."""
    num_skipped: int = 0
    """Versions with an update whose gradient was not finite."""
    num_parked: int = 0
    """Times that the agent left the memory for others."""

    def __post_init__(self) -> None:
        ref = self.assignment.ref
        self.account = ComputeAccount(self.assignment.document.tenant, ref.uid, self.assignment.policy_key)

    def begin(self, assignment: Assignment, task: asyncio.Task[None]) -> None:
        """Record that an asyncio task has begun to train the agent for this assignment, and clear the fault of the task before."""
        self.assignment = assignment
        self.account = replace(self.account, tenant=assignment.document.tenant)
        self.task = task
        self.fault = None

    def end(self) -> None:
        """Cancel the task, unless it is already releasing adapter, lease and consumer, which must not be interrupted.

        May be repeated.
        """
        if self.task is not None and not (self.binding is not None and self.binding.is_releasing):
            self.task.cancel()

    @property
    def version(self) -> int:
        """The agent's committed version; -1 if the agent is not bound, or has no committed version yet."""
        return -1 if self.binding is None else self.binding.lease.record.version

    @property
    def is_idle(self) -> bool:
        """Whether no task trains the agent, or cleans up after it."""
        return self.task is None and not self.is_cleaning

    @property
    def is_leaving(self) -> bool:
        """Whether the agent is released at its next step boundary."""
        return self.binding is not None and self.binding.is_leaving

    def lost_to(self, known: PolicyEntry | None) -> bool:
        """Return whether the policy key was deleted, or written by another trainer or for another job, after this trainer's last write.

        The cache may lag behind this trainer's own writes, so only a newer revision counts.
        """
        if self.binding is None or known is None or known.entry.revision <= self.binding.lease.revision:
            return False
        ours, record = self.binding.lease.record, known.record
        return record is None or record.uid != ours.uid or record.epoch > ours.epoch

    def advance(self, now: float) -> tuple[float, float]:
        """Add the agent's work until `now`, in seconds, to `work`; return as `RecentWork.advance`."""
        return self.work.advance(self.account.busy_s, self.binding is not None, now)

    async def compute(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        """Run work on the compute thread, charged to the agent. Raises as `Compute.run`."""
        return await self.shared.compute.run(work, self.account, num_tokens)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the call's result, waiting while the bus or the blob store is unavailable."""
        return await patiently(call, self.assignment.policy_key, self.shared.timing.retry_s)

    async def emit(self, reason: str, message: str) -> None:
        """Publish an event of the agent's job. reason: one CamelCase word. message: what happened; the agent's name is put before it."""
        text = f"agent {self.assignment.agent.name}: {message}"
        await EventEmitter(self.shared.context, "trainer").emit(self.assignment.ref, reason, text)

    def samples(self) -> list[Sample]:
        """Return the agent's counters as samples of metrics."""
        labels = {**of_job(self.assignment.ref), "agent": self.assignment.agent.name}
        counters = (
            ("commits", "Versions committed.", self.num_commits),
            ("out_of_memory", "Steps restarted with a lower token budget.", self.num_out_of_memory),
            ("skipped_updates", "Versions with an update whose gradient was not finite.", self.num_skipped),
            ("parked", "Times that the agent left the memory for others.", self.num_parked),
        )
        return [Sample(f"marlaas_trainer_{name}_total", "counter", text, num, labels) for name, text, num in counters]


def text_of(error: Exception) -> str:
    """Return an error's text, after its type's name if it is no MarlaasError."""
    return str(error) if isinstance(error, MarlaasError) else f"{type(error).__name__}: {error}"


def reason_of(error: Exception, num_others: int) -> tuple[str, str]:
    """Return an event's reason and text for an error that ended an agent's training. num_others: other agents on this trainer."""
    if isinstance(error, OutOfMemory):
        return _lack_of_memory(error, num_others)
    if isinstance(error, BusRefused):
        text = f"the bus refuses what the trainer needs of it: {error}; check the permissions of the trainer's user"
        return "BusRefused", text
    if isinstance(error, Retryable) and error.reason is not None:
        return error.reason, text_of(error)
    return "TrainingFailed", text_of(error)


def _lack_of_memory(error: OutOfMemory, num_others: int) -> tuple[str, str]:
    """Return the reason and the text for an agent whose adapter, optimizer moments or probes do not fit the device's memory.

    With other agents on this trainer, the trainer is full, and this is not a fault of the job.
    """
    advice = "lower its adapter's rank in a new job, or give the pool's trainer more memory"
    if num_others:
        advice = f"the trainer is full (other agents on it: {num_others}); this one is tried again, here or on another trainer"
    text = f"no memory for the agent's adapter, optimizer or probes: {error}; {advice}"
    return "OutOfMemory" if num_others else "TrainingFailed", text

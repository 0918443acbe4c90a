"""Why an agent's training failed on this trainer, as the report and the events say it. Pure.

A fault of the job is reported as such, and the job fails once all trainers report it. A fault of the trainer or of the
bus is not the job's: the agent is tried again, here or on another trainer.
"""

from dataclasses import dataclass

from marlaas_api.bus import BusRefused
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_worker.device_errors import OutOfMemory


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
    """What happened and what to do, for the event and the report."""

    @property
    def is_the_jobs(self) -> bool:
        """Whether another trainer would fail in the same way."""
        return self.reason == "TrainingFailed"


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

"""Agents whose training failed on this trainer: how long they are left alone, and what the report and the events say.

A fault of the job is reported as such, and the job fails once all trainers report it. A fault of the trainer or of the
bus is not the job's: the agent is tried again, here or on another trainer.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from marlaas_api.bus import BusRefused
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_worker.device_errors import OutOfMemory
from marlaas_worker.trainer.assignment import Assignment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentFault:
    """Why an agent is not trained until a time. version: its committed one at the fault. reason: of the event."""

    assignment: Assignment
    version: int
    until: float
    reason: str
    text: str

    @property
    def is_the_jobs(self) -> bool:
        """Whether another trainer would fail in the same way."""
        return self.reason == "TrainingFailed"


def text_of(error: Exception) -> str:
    """Return an error's text; other errors than ours are named by their type too."""
    return str(error) if isinstance(error, MarlaasError) else f"{type(error).__name__}: {error}"


def _reason_of(error: Exception, num_others: int) -> tuple[str, str]:
    """Return the reason and the text of an error that ended an agent's training. num_others: other agents on this trainer."""
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


class Faults:
    """The faults of this trainer, by policy key."""

    def __init__(self, now: Callable[[], float], fault_s: float) -> None:
        self._now, self._fault_s = now, fault_s
        self._faults: dict[str, AgentFault] = {}

    def add(self, assignment: Assignment, version: int, error: Exception, num_others: int) -> AgentFault:
        """Record that an agent's training failed at a version, and leave it alone for a while."""
        fault = AgentFault(assignment, version, self._now() + self._fault_s, *_reason_of(error, num_others))
        log.warning("%s is suspended for %g s: %s", assignment.policy_key, self._fault_s, fault.text)
        self._faults[assignment.policy_key] = fault
        return fault

    def forget(self, key: str) -> None:
        """Drop an agent's fault, because it is tried again."""
        self._faults.pop(key, None)

    def keep(self, wanted: Mapping[str, Assignment]) -> None:
        """Drop the faults of agents that are no longer wanted, or whose training has been edited."""
        self._faults = {key: fault for key, fault in self._faults.items() if fault.assignment.is_as(wanted.get(key))}

    @property
    def refused(self) -> frozenset[str]:
        """Agents that are left alone now."""
        now = self._now()
        return frozenset(key for key, fault in self._faults.items() if now < fault.until)

    def broken(self, version_of: Callable[[Assignment], int]) -> dict[str, str]:
        """Return the texts of the jobs' own faults, by `JobAgent.fault_key`.

        Those of agents that another trainer has trained since are left out: the next fault is another one.
        """
        return {
            fault.assignment.fault_key: fault.text
            for fault in self._faults.values()
            if fault.is_the_jobs and version_of(fault.assignment) <= fault.version
        }

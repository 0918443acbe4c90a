"""Dependencies, timing and event publishing that all agents of one trainer share."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from marlaas_api.messages import Calibration
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.agent_memory import AgentMemory
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.room import AgentRoom
from marlaas_worker.trainer.version_cache import VersionCache


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals in seconds.

    report_s: between reports. reconcile_s: between reads of all keys. retry_s: before a call is tried again.
    missing_turn_s: until a missing turn counts as lost. fault_s: before an agent that failed is tried again.
    """

    report_s: float = 2.0
    reconcile_s: float = 3.0
    retry_s: float = 1.0
    missing_turn_s: float = 60.0
    fault_s: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class TrainerDependencies:
    """Dependencies and counters that all agents of one trainer share.

    The counters are by policy key, since the process started.
    commits: committed versions. out_of_memory: steps restarted with a lower token budget. skipped: updates without a
    finite gradient. parked: times that agents left the memory for others.
    """

    context: RoleContext
    model: BaseModel
    compute: Compute
    timing: Timing
    calibration: Calibration
    memory: AgentMemory = field(default_factory=AgentMemory)
    room: AgentRoom = field(default_factory=AgentRoom)
    versions: VersionCache = field(default_factory=VersionCache)
    commits: Counter[str] = field(default_factory=Counter)
    out_of_memory: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)

    def keep_counters(self, jobs: Container[str]) -> None:
        """Drop the counters of agents of all other jobs; jobs are given by key."""
        for counter in (self.commits, self.out_of_memory, self.skipped, self.parked):
            for key in [key for key in counter if key.rpartition(".")[0] not in jobs]:
                del counter[key]

    async def emit(self, assignment: Assignment, reason: str, message: str) -> None:
        """Publish an event of the agent's job."""
        text = f"agent {assignment.agent.name}: {message}"
        await EventEmitter(self.context, "trainer").emit(assignment.ref, reason, text)

"""What all agents of one trainer share, and how a trainer tells a job's story."""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from marlaas_api import subjects, wire
from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.messages import Calibration, JobEvent
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.model import BaseModel


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: between reports; between looks at all keys; before a call is tried again; until a missing turn counts as lost; before an
    agent that failed is tried again."""

    report_s: float = 2.0
    reconcile_s: float = 3.0
    retry_s: float = 1.0
    missing_turn_s: float = 60.0
    fault_s: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class TrainerDependencies:
    """What all agents of this trainer share. By policy key, since the start: commits, versions committed; out_of_memory, steps begun anew with a lower
    token budget; skipped, updates without a finite gradient."""

    context: RoleContext
    model: BaseModel
    compute: Compute
    timing: Timing
    calibration: Calibration
    commits: Counter[str] = field(default_factory=Counter)
    out_of_memory: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    async def emit(self, assignment: Assignment, reason: str, message: str) -> None:
        """Add a sentence to the job's story; if the bus will not have it, it goes untold."""
        ref = assignment.ref
        event = JobEvent(
            namespace=ref.namespace,
            job=ref.name,
            uid=ref.uid,
            role="trainer",
            at=self.context.now(),
            reason=reason,
            message=f"agent {assignment.agent.name}: {message}",
        )
        with contextlib.suppress(BusRefused, BusUnavailable):
            await self.context.bus.publish(subjects.event(ref.namespace, ref.name, "trainer"), wire.encode(event))

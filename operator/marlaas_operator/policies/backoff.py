"""When a job's sandboxes have crashed too often (`spec.backoffLimit`)."""

from collections.abc import Mapping
from typing import Any

from marlaas_api.messages import JobVerdict
from marlaas_api.reasons import Reason
from marlaas_operator.policies.faults import first_fault
from marlaas_operator.snapshot import JobSnapshot


def sandbox_crashes(snapshot: JobSnapshot) -> int:
    """Crashes of the job's sandboxes so far; a pod that was evicted for what it wrote itself crashed once more than it restarted.

    Pods that were replaced take their counts with them, so the stored number is a floor.
    """
    stored: Mapping[str, Any] = snapshot.status or {}
    return max(int(stored.get("sandboxCrashes") or 0), sum(pod.restarts + pod.overran for pod in snapshot.pods))


def verdict(snapshot: JobSnapshot) -> JobVerdict | None:
    """Why the job cannot go on; None if it can."""
    progress, job = snapshot.own_progress, snapshot.job
    if job is None or progress is None or not progress.admitted or progress.phase.final:
        return None
    crashes, limit = sandbox_crashes(snapshot), job.spec.backoff_limit
    if crashes <= limit:
        return None
    fault = first_fault(snapshot.pods)
    words = f"; the last: {fault.message}" if fault is not None else ""
    text = f"its sandboxes have crashed {crashes} times, and backoffLimit is {limit}{words}"
    return JobVerdict(reason=Reason.BACKOFF_LIMIT_EXCEEDED, message=text)

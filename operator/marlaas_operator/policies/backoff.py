"""Limit of sandbox crashes per job (`spec.backoffLimit`)."""

from collections.abc import Mapping
from typing import Any

from marlaas_api.messages import JobVerdict
from marlaas_api.reasons import Reason
from marlaas_operator.policies.faults import first_fault
from marlaas_operator.snapshot import JobSnapshot


def sandbox_crashes(snapshot: JobSnapshot) -> int:
    """Return the number of crashes of the job's sandboxes so far.

    A pod that was evicted because it wrote too much counts one crash more than its restarts. Replaced pods no
    longer show their restarts, so the stored number is a lower bound.
    """
    stored: Mapping[str, Any] = snapshot.status or {}
    return max(int(stored.get("sandboxCrashes") or 0), sum(pod.restarts + pod.overran for pod in snapshot.pods))


def verdict(snapshot: JobSnapshot) -> JobVerdict | None:
    """Return the verdict that stops a job with too many sandbox crashes; None if it may continue."""
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

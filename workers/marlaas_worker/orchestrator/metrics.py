"""Metrics of the orchestrator: jobs by phase, and the progress of each admitted job. Pure."""

from collections import Counter
from collections.abc import Iterable

from marlaas_api.messages import Phase, Progress
from marlaas_worker.metrics import Sample, of_job


def samples(levels: Iterable[Progress], leads: bool) -> list[Sample]:
    """Return all samples. leads: whether this replica holds the lease; a standby reports no jobs."""
    known = list(levels) if leads else []
    phases = Counter(level.phase for level in known)
    found = [Sample("marlaas_orchestrator_leads", "gauge", "1 while this replica holds the lease.", float(leads))]
    for phase in Phase:
        labels = {"phase": phase.value}
        found.append(Sample("marlaas_jobs", "gauge", "Jobs by phase.", phases[phase], labels))
    for level in known:
        if level.admitted:
            found += _of_job(level)
    return found


def _of_job(level: Progress) -> list[Sample]:
    labels = of_job(level.ref)
    found = [
        Sample("marlaas_job_steps_total", "counter", "Finished steps.", level.step, labels),
        Sample("marlaas_job_tokens_total", "counter", "Generated tokens.", level.tokens, labels),
        Sample("marlaas_job_accelerator_seconds_total", "counter", "Engine seconds.", level.accelerator_s, labels),
        Sample(
            "marlaas_job_outstanding_groups",
            "gauge",
            "Groups given out, not trained yet.",
            level.num_outstanding,
            labels,
        ),
        Sample(
            "marlaas_job_staleness", "gauge", "Mean staleness of the last step, in versions.", level.staleness, labels
        ),
    ]
    if level.reward is not None:
        found.append(Sample("marlaas_job_reward", "gauge", "Mean reward of the last step.", level.reward, labels))
    for fault, number in sorted(level.faults.items()):
        text = "Episodes that did not count, by class."
        found.append(Sample("marlaas_job_faults_total", "counter", text, number, {**labels, "class": fault}))
    for fault, number in sorted(level.training_faults.items()):
        text = "Faults of training that cost no step, by class."
        found.append(Sample("marlaas_job_training_faults_total", "counter", text, number, {**labels, "class": fault}))
    return found

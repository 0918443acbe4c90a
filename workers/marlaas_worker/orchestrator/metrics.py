"""Metrics of the orchestrator: jobs by phase, and the progress of each admitted job. Pure."""

from collections import Counter
from collections.abc import Iterable

from marlaas_api.messages import Phase, Progress
from marlaas_worker.metrics import Sample, of_job


def samples(all_progress: Iterable[Progress], leads: bool) -> list[Sample]:
    """Return all samples. leads: whether this replica holds the lease; a standby reports no jobs."""
    known = list(all_progress) if leads else []
    phases = Counter(progress.phase for progress in known)
    found = [Sample("marlaas_orchestrator_leads", "gauge", "1 while this replica holds the lease.", float(leads))]
    for phase in Phase:
        labels = {"phase": phase.value}
        found.append(Sample("marlaas_jobs", "gauge", "Jobs by phase.", phases[phase], labels))
    for progress in known:
        if progress.admitted:
            found += _of_job(progress)
    return found


def _of_job(progress: Progress) -> list[Sample]:
    labels = of_job(progress.ref)
    found = [
        Sample("marlaas_job_steps_total", "counter", "Finished steps.", progress.step, labels),
        Sample("marlaas_job_tokens_total", "counter", "Generated tokens.", progress.tokens, labels),
        Sample("marlaas_job_accelerator_seconds_total", "counter", "Engine seconds.", progress.accelerator_s, labels),
        Sample(
            "marlaas_job_outstanding_groups",
            "gauge",
            "Groups given out, not trained yet.",
            progress.num_outstanding,
            labels,
        ),
        Sample(
            "marlaas_job_staleness",
            "gauge",
            "Mean staleness of the last step, in versions.",
            progress.staleness,
            labels,
        ),
    ]
    if progress.reward is not None:
        found.append(Sample("marlaas_job_reward", "gauge", "Mean reward of the last step.", progress.reward, labels))
    for fault, number in sorted(progress.faults.items()):
        text = "Episodes that did not count, by class."
        found.append(Sample("marlaas_job_faults_total", "counter", text, number, {**labels, "class": fault}))
    for fault, number in sorted(progress.training_faults.items()):
        text = "Faults of training that cost no step, by class."
        found.append(Sample("marlaas_job_training_faults_total", "counter", text, number, {**labels, "class": fault}))
    return found

"""A worker's readiness, liveness and Prometheus metrics.

A role sets the callables of its context's `Metrics` once; `health` calls them at each request. This module does
no I/O and imports no HTTP or Prometheus library.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from marlaas_api.messages import ReplicaReport
from marlaas_api.names import JobRef


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a Prometheus metric.

    Attributes:
        name: of the metric; includes the unit, and ends in `_total` for a counter.
        text: the help text, the same for every sample of the name.
        labels: values of the labels, by label.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _no_samples() -> Iterable[Sample]:
    return ()


@dataclass(slots=True)
class Metrics:
    """Callables that report a worker's state.

    Attributes:
        alive: whether the process can still do work; False requests a restart.
        ready: whether this worker is doing its work now (for a standby: whether it is standing by).
        connected: whether there is a connection to the bus.
        num_breaks: number of lost connections to the bus so far.
        samples: the role's own metrics.
    """

    alive: Callable[[], bool] = lambda: True
    ready: Callable[[], bool] = lambda: False
    connected: Callable[[], bool] = lambda: False
    num_breaks: Callable[[], int] = lambda: 0
    samples: Callable[[], Iterable[Sample]] = _no_samples

    def all_samples(self) -> list[Sample]:
        """Return the role's samples and those common to all workers."""
        return [
            Sample("marlaas_ready", "gauge", "1 while this worker does its work.", float(self.ready())),
            Sample("marlaas_bus_connected", "gauge", "1 while connected to the bus.", float(self.connected())),
            Sample("marlaas_bus_breaks_total", "counter", "Connections to the bus that broke.", self.num_breaks()),
            *self.samples(),
        ]


def of_job(ref: JobRef) -> dict[str, str]:
    """Return the labels of a job's metrics."""
    return {"namespace": ref.namespace, "job": ref.name}


def of_report(report: ReplicaReport, jobs: Mapping[str, JobRef]) -> list[Sample]:
    """Return the metrics of a rollout or trainer replica. jobs: by uid; other jobs of the report are left out."""
    prefix = f"marlaas_{report.role}"
    num_broken = len({key.partition(".")[0] for key in report.broken})  # by job uid and agent
    samples = [
        Sample(f"{prefix}_busy_seconds_total", "counter", "Seconds of work since the start.", report.busy_s),
        Sample(f"{prefix}_wall_seconds_total", "counter", "Seconds since the start.", report.wall_s),
        Sample(f"{prefix}_running", "gauge", "Requests in the batch, or agents bound.", report.num_running),
        Sample(f"{prefix}_broken_jobs", "gauge", "Jobs that this worker has given up for now.", num_broken),
    ]
    for uid, ref in jobs.items():
        if uid in report.job_engine_s:
            seconds = report.job_engine_s[uid]
            text = "Seconds of work by job."
            samples.append(Sample(f"{prefix}_job_seconds_total", "counter", text, seconds, of_job(ref)))
        if uid in report.job_tokens:
            tokens = report.job_tokens[uid]
            samples.append(Sample(f"{prefix}_tokens_total", "counter", "Generated tokens.", tokens, of_job(ref)))
    return samples

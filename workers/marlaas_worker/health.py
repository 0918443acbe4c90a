"""Health checks and metrics of a worker, over HTTP (`marlaas_api.health`).

A response shows that the event loop runs; a role whose tasks have ended has also ended its process. /livez also
fails when the role reports that its process can do no more work (`Metrics.alive`), in case its shutdown hangs.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from marlaas_api.health import HealthEndpoints, serve_health
from marlaas_worker.metrics import Metrics, Sample

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def health_server(port: int, metrics: Metrics) -> AsyncIterator[int]:
    """Serve health checks and metrics while the context is open, and yield the port. Port 0 lets the system choose one. Raises InvalidInput."""
    endpoints = HealthEndpoints(
        alive=lambda: "" if metrics.alive() else "not alive",
        ready=lambda: "" if metrics.ready() else "not ready",
        families=lambda: families(metrics.all_samples()),
    )
    async with serve_health(endpoints, port) as chosen:
        log.info("health at port %d", chosen)
        yield chosen


def families(samples: Iterable[Sample]) -> list[CounterMetricFamily | GaugeMetricFamily]:
    """Return one Prometheus family for each name of a sample. Samples of one name have the same label names."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    return [_family(samples) for samples in by_name.values()]


def _family(samples: list[Sample]) -> CounterMetricFamily | GaugeMetricFamily:
    first = samples[0]
    family_type = CounterMetricFamily if first.kind == "counter" else GaugeMetricFamily
    family = family_type(first.name, first.text, labels=tuple(first.labels))
    for sample in samples:
        family.add_metric([sample.labels[label] for label in first.labels], sample.value)
    return family

"""The operator's metrics, for Prometheus."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_GAUGES = {
    "bus_available": "1 while the bus answers.",
    "objects": "Kubernetes objects in the cache.",
    "queue_depth": "Objects that wait for a reconcile.",
    "queue_running": "Reconciles in progress.",
    "quiet_seconds": "Seconds since the last reconcile began.",
}

Gauges = Mapping[str, float]


class OperatorMetrics:
    """Counters since the start of the process."""

    def __init__(self) -> None:
        self.reconciles: Counter[tuple[str, str]] = Counter()
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: Counter[float] = Counter()
        self._sum_s = 0.0

    def reconciled(self, kind: str, outcome: str, seconds: float) -> None:
        """Count one reconcile of a kind. outcome: `ok`, or the name of the error's class."""
        self.reconciles[kind, outcome] += 1
        self._seconds[next((bound for bound in _BOUNDS_S if seconds <= bound), float("inf"))] += 1
        self._sum_s += seconds

    def requested(self, verb: str, plural: str, status: int) -> None:
        """Count one request to the API server. status: HTTP status, 0 for no answer."""
        self.requests[verb, plural, str(status)] += 1

    def families(self, gauges: Gauges) -> Iterator[Metric]:
        """Return all metrics. gauges: current values by name, without the prefix `marlaas_operator_`."""
        reconciles = CounterMetricFamily(
            "marlaas_operator_reconciles_total", "Reconciles since the start.", labels=("kind", "outcome")
        )
        for reconcile, number in sorted(self.reconciles.items()):
            reconciles.add_metric(reconcile, number)
        requests = CounterMetricFamily(
            "marlaas_operator_api_requests_total",
            "Requests to the API server since the start.",
            labels=("verb", "resource", "status"),
        )
        for request, number in sorted(self.requests.items()):
            requests.add_metric(request, number)
        yield from (reconciles, requests, self._histogram())
        for name, value in sorted(gauges.items()):
            yield GaugeMetricFamily(f"marlaas_operator_{name}", _GAUGES[name], value)

    def _histogram(self) -> HistogramMetricFamily:
        counts = accumulate(self._seconds[bound] for bound in _BOUNDS_S)
        buckets = [(f"{bound:g}", float(number)) for bound, number in zip(_BOUNDS_S, counts, strict=True)]
        return HistogramMetricFamily(
            "marlaas_operator_reconcile_seconds",
            "Duration of a reconcile.",
            buckets=[*buckets, ("+Inf", float(self._seconds.total()))],
            sum_value=self._sum_s,
        )

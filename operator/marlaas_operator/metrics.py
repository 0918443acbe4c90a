"""Metrics of the operator, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

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

    def text(self, gauges: Gauges) -> str:
        """Return all metrics as text. gauges: values that are read at this moment, by name."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Gauges) -> Iterator[str]:
        yield "# TYPE marlaas_operator_reconciles_total counter"
        for (kind, outcome), number in sorted(self.reconciles.items()):
            yield f'marlaas_operator_reconciles_total{{kind="{kind}",outcome="{outcome}"}} {number}'
        yield "# TYPE marlaas_operator_api_requests_total counter"
        for (verb, plural, status), number in sorted(self.requests.items()):
            labels = f'verb="{verb}",resource="{plural}",status="{status}"'
            yield f"marlaas_operator_api_requests_total{{{labels}}} {number}"
        yield from self._histogram("marlaas_operator_reconcile_seconds")
        for name, value in sorted(gauges.items()):
            yield f"# TYPE marlaas_operator_{name} gauge"
            yield f"marlaas_operator_{name} {value:g}"

    def _histogram(self, name: str) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        for bound, number in zip(_BOUNDS_S, accumulate(self._seconds[bound] for bound in _BOUNDS_S), strict=True):
            yield f'{name}_bucket{{le="{bound:g}"}} {number}'
        yield f'{name}_bucket{{le="+Inf"}} {self._seconds.total()}'
        yield f"{name}_sum {self._sum_s:.6f}"
        yield f"{name}_count {self._seconds.total()}"

"""The operator's HTTP server: health and metrics."""

import httpx
from tests.operator.shell.harness import ServiceHarness

from marlaas_api.health import HealthEndpoints, serve_health


async def test_the_endpoints_say_what_is_missing_and_what_was_counted() -> None:
    harness = ServiceHarness()
    endpoints = HealthEndpoints(lambda: "", harness.service.missing, harness.service.metric_families)
    async with serve_health(endpoints, 0) as port, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port}"
        assert (await client.get(f"{url}/livez")).text == "ok\n"
        assert (await client.get(f"{url}/readyz")).status_code == 503
        assert (await client.get(f"{url}/nowhere")).status_code == 404
        harness.service.metrics.reconciled("RLJob", "ok", 0.02)
        harness.service.metrics.requested("PATCH", "rljobs/status", 200)
        text = (await client.get(f"{url}/metrics")).text
    assert 'marlaas_operator_reconciles_total{kind="RLJob",outcome="ok"} 1.0' in text
    assert 'marlaas_operator_api_requests_total{resource="rljobs/status",status="200",verb="PATCH"} 1.0' in text
    assert 'marlaas_operator_reconcile_seconds_bucket{le="0.025"} 1.0' in text
    assert "marlaas_operator_queue_depth 0.0" in text

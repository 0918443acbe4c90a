"""HTTP server for the health checks and metrics of a role or the operator.

The server runs in the process's own event loop, so that a hung loop fails /livez. aiohttp serves HTTP;
prometheus_client writes the text format, from a registry of its own, because its global registry belongs to vLLM.
Import this module only where the server is started: an environment's image has neither library.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from marlaas_api.errors import InvalidInput

REQUEST_S = 5.0
_SHUTDOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class HealthEndpoints:
    """Content of the endpoints; each callable runs at every request.

    Attributes:
        alive: returns an empty text, or the reason why the process must be restarted.
        ready: returns an empty text, or the reason why the process is not ready.
        families: returns the metrics.
    """

    alive: Callable[[], str]
    ready: Callable[[], str]
    families: Callable[[], Iterable[Metric]]

    async def livez(self, _: web.Request) -> web.Response:
        """Answer /livez and /healthz."""
        return _check(self.alive())

    async def readyz(self, _: web.Request) -> web.Response:
        """Answer /readyz."""
        return _check(self.ready())

    async def metrics(self, _: web.Request) -> web.Response:
        """Answer /metrics."""
        return web.Response(text=exposition(self.families()), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


@contextlib.asynccontextmanager
async def serve_health(endpoints: HealthEndpoints, port: int) -> AsyncIterator[int]:
    """Serve on all addresses while the context is open, and yield the port.

    port: 0 lets the system choose a port, on IPv4 only.

    Raises:
        InvalidInput: the port is taken.
    """
    app = web.Application()
    app.router.add_get("/livez", endpoints.livez)
    app.router.add_get("/healthz", endpoints.livez)
    app.router.add_get("/readyz", endpoints.readyz)
    app.router.add_get("/metrics", endpoints.metrics)
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
        keepalive_timeout=REQUEST_S,  # also bounds the time from the connection to the end of the first request's head
        lingering_time=REQUEST_S,  # bounds the time that an unread request body may take
    )
    await runner.setup()
    try:
        host = None if port else "0.0.0.0"  # with port 0, IPv4 and IPv6 sockets would get different ports
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidInput(f"--health {port}: {error.strerror or error}") from error
        yield site.port
    finally:
        await runner.cleanup()


def exposition(families: Iterable[Metric]) -> str:
    """Format metrics in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    return generate_latest(registry).decode()


class _FamilyCollector(Collector):
    """Metrics that were read elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _check(failure: str) -> web.Response:
    return web.Response(status=503, text=f"{failure}\n") if failure else web.Response(text="ok\n")

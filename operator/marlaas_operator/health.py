"""HTTP server for health checks and metrics: /livez, /readyz, /metrics (and /healthz, which is /livez)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

_PATIENCE_S = 5.0
_LONGEST_LINE = 1 << 14


@dataclass(frozen=True, slots=True)
class HealthEndpoints:
    """Content of the endpoints.

    Attributes:
        ready: returns an empty text, or the reason why the operator is not ready.
        metrics: returns the metrics in Prometheus' text format.
    """

    ready: Callable[[], str]
    metrics: Callable[[], str]

    def answer(self, path: str) -> tuple[int, str]:
        """Return HTTP status and text for a path."""
        match path:
            case "/livez" | "/healthz":
                return 200, "ok\n"
            case "/readyz":
                missing = self.ready()
                return (503, f"{missing}\n") if missing else (200, "ok\n")
            case "/metrics":
                return 200, self.metrics()
            case _:
                return 404, "there are /livez, /readyz and /metrics\n"


@contextlib.asynccontextmanager
async def opened(endpoints: HealthEndpoints, port: int, host: str = "0.0.0.0") -> AsyncIterator[int]:
    """Serve while the context is open; yield the port. port 0: the system chooses one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(_PATIENCE_S):
                await _exchange(endpoints, reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, host, port, limit=_LONGEST_LINE)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def _exchange(endpoints: HealthEndpoints, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
    status, text = endpoints.answer(request.split(" ", 2)[1].partition("?")[0])
    body = text.encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await writer.drain()

"""HTTP server for a worker's health checks and metrics: GET /livez, /readyz and /metrics, in the role's own event loop.

A response shows that the event loop runs; a role whose tasks have ended has also ended its process. /livez also
fails when the role reports that its process can do no more work (`Metrics.alive`), in case its shutdown hangs.
The server implements only the HTTP/1.1 that a kubelet and Prometheus need (one request per connection). It
knows nothing of roles.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from marlaas_api.errors import InvalidInput
from marlaas_worker.metrics import Metrics, exposition

MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
Answer = tuple[int, str, str]

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def health_server(port: int | None, metrics: Metrics) -> AsyncIterator[int | None]:
    """Serve on all addresses while the context is open, and yield the port.

    port: 0 lets the system choose a port; None starts no server and yields None.

    Raises:
        InvalidInput: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        host = None if port else "0.0.0.0"  # with port 0, IPv4 and IPv6 sockets would get different ports
        server = await asyncio.start_server(_HealthEndpoints(metrics).answer, host, port, limit=MAX_REQUEST_BYTES)
    except OSError as error:
        raise InvalidInput(f"--health {port}: {error.strerror or error}") from error
    async with server:
        chosen = int(server.sockets[0].getsockname()[1])
        log.info("health at port %d", chosen)
        yield chosen


def answer_to(method: str, path: str, metrics: Metrics) -> Answer:
    """Return status, content type and body for a request."""
    if method not in ("GET", "HEAD"):
        return 405, "text/plain", "only GET\n"
    match path.partition("?")[0]:
        case "/livez":
            return (200, "text/plain", "ok\n") if metrics.alive() else (503, "text/plain", "not alive\n")
        case "/readyz":
            return (200, "text/plain", "ok\n") if metrics.ready() else (503, "text/plain", "not ready\n")
        case "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", exposition(metrics.all_samples())
        case _:
            return 404, "text/plain", "/livez, /readyz or /metrics\n"


class _HealthEndpoints:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; close the connection if the client disconnects or exceeds REQUEST_S."""
        try:
            async with asyncio.timeout(REQUEST_S):
                method, answer = await self._ask(reader)
                writer.write(_response(method, answer))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.LimitOverrunError, ValueError):
            return "GET", (400, "text/plain", "not a request\n")
        return method, answer_to(method, path, self._metrics)


def _response(method: str, answer: Answer) -> bytes:
    status, kind, body = answer
    payload = body.encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else payload)

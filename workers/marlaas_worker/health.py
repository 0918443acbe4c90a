"""A worker's small HTTP door for a kubelet and for Prometheus: GET /livez, /readyz and /metrics, in the role's own event loop.

That it answers at all shows that the loop turns, and a role whose tasks have ended has ended its process; /livez fails besides when the role says that
its process can do nothing more (`Metrics.alive`), in case its end hangs. It speaks just enough HTTP/1.1 for its two callers (one request a connection) and knows nothing of roles.
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
    """Answer on all addresses while the context is open; yields the port (0 has one chosen). `port` None: no door.

    Raises:
        InvalidInput: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        host = None if port else "0.0.0.0"  # a chosen port is one of IPv4 alone
        server = await asyncio.start_server(_HealthEndpoints(metrics).answer, host, port, limit=MAX_REQUEST_BYTES)
    except OSError as error:
        raise InvalidInput(f"--health {port}: {error.strerror or error}") from error
    async with server:
        chosen = int(server.sockets[0].getsockname()[1])
        log.info("health at port %d", chosen)
        yield chosen


def answer_to(method: str, path: str, metrics: Metrics) -> Answer:
    """Status, content type and body of a request."""
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
        """One request; a caller that goes away or talks too long is let go."""
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

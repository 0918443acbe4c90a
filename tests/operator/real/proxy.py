"""A proxy before the API server that does to requests what a test says: wrong answers, broken connections, watches that fall silent.

It speaks plain HTTP to the client and, as the administrator, TLS to the server.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

import aiohttp
from aiohttp import web

from marlaas_e2e.control_plane import ControlPlane

_HOP = {"transfer-encoding", "content-length", "connection", "content-encoding", "host"}
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]
"""What answers a request in the server's place."""


def answer(status: int, reason: str, **headers: str) -> Fault:
    async def fault(_: web.Request) -> web.Response:
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        return web.json_response(_status(status, reason), status=status, headers=given)

    return fault


async def reset(request: web.Request) -> web.Response:
    request.transport.abort()
    return web.Response()


async def gone(request: web.Request) -> web.StreamResponse:
    """A watch is told that its resource version is too old."""
    response = await _opened(request)
    await response.write(json.dumps({"type": "ERROR", "object": _status(410, "Expired")}).encode() + b"\n")
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    """A watch stays open, also one that is open already, and says nothing any more."""
    response = await _opened(request)
    await asyncio.Event().wait()  # until the client has had enough: then this handler is cancelled
    return response


async def _opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    return response


def _status(code: int, reason: str) -> dict[str, object]:
    words = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return words | {"message": f"injected: {HTTPStatus(code).phrase}"}


def is_watch(request: web.Request) -> bool:
    return request.query.get("watch") == "true"


class Proxy:
    """Lets every request pass but for those that a test has a fault for. faults: how often it has struck."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._left, self._fault, self._matches = 0, reset, is_watch
        self.faults = 0
        self.url = ""
        self._session: aiohttp.ClientSession | None = None

    def times(self, number: int, fault: Fault, matches: Callable[[web.Request], bool]) -> None:
        """The next so many matching requests have this fault; then all is well. Faults are counted from here."""
        self._left, self._fault, self._matches = number, fault, matches
        self.faults = 0

    def _strikes(self, request: web.Request) -> bool:
        found = self._left > 0 and self._matches(request)
        self._left -= found
        self.faults += found
        return found

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        context = ssl.create_default_context(cafile=str(self._plane.authority))
        context.load_cert_chain(self._plane.admin.certificate, self._plane.admin.key)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return await (self._fault if self._strikes(request) else self._forward)(request)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in {*_HOP, "authorization"}}
        asked = {"headers": headers, "data": await request.read() or None, "timeout": aiohttp.ClientTimeout(total=None)}
        async with self._session.request(request.method, f"{self._plane.url}{request.path_qs}", **asked) as upstream:
            kept = {key: value for key, value in upstream.headers.items() if key.lower() not in _HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                if self._fault is silent and is_watch(request) and self._strikes(request):
                    await asyncio.Event().wait()
                await response.write(chunk)
            await response.write_eof()
            return response

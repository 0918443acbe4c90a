"""A proxy before the API server that does to requests what a test says: wrong answers, broken connections, watches that fall silent.

It speaks plain HTTP to the client and, as the administrator, TLS to the server.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

from marlaas_e2e.control_plane import ControlPlane

_HOP = {"transfer-encoding", "content-length", "connection", "content-encoding", "host"}


@dataclass(frozen=True)
class Fault:
    """What happens to a request. status 0: the connection is reset. reason: of the Status object that is answered. gone: a
    watch is told that its resource version is too old. silent: a watch stays open and says nothing any more."""

    status: int = 0
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    gone: bool = False
    silent: bool = False


Decide = Callable[[web.Request, bool], Fault | None]
"""The fault of a request; with True, of a watch that is open already."""


def answer(status: int, reason: str, **headers: str) -> Fault:
    """An answer in the server's place."""
    return Fault(status, reason, {key.replace("_", "-"): value for key, value in headers.items()})


RESET = Fault()
GONE = Fault(gone=True)
SILENT = Fault(silent=True)


class Proxy:
    """decide: asked of every request; None lets it pass."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.decide: Decide = lambda request, is_open: None
        self.faults = 0
        self.url = ""
        self._session: aiohttp.ClientSession | None = None

    def times(self, number: int, fault: Fault, matches: Callable[[web.Request], bool]) -> None:
        """The next so many matching requests have this fault; then all is well. Faults are counted from here."""
        left = [number]
        self.faults = 0

        def decide(request: web.Request, is_open: bool) -> Fault | None:
            if left[0] <= 0 or not matches(request) or (is_open and not fault.silent):
                return None
            left[0] -= 1
            return fault

        self.decide = decide

    def kubeconfig(self, folder: Path) -> Path:
        """Of a client that goes through the proxy."""
        file = folder / "proxy.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "anybody", "user": {"token": "proxied"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "anybody"}}],
            "current-context": "proxy",
        }
        file.write_text(yaml.safe_dump(config))
        return file

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        context = ssl.create_default_context(cafile=str(self._plane.authority))
        context.load_cert_chain(self._plane.admin.certificate, self._plane.admin.key)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), auto_decompress=False
        ) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self.decide(request, False)
        if fault is None:
            return await self._forward(request)
        self.faults += 1
        if fault.gone:
            return await _say_gone(request)
        if fault.silent:
            return await _say_nothing(request)
        if fault.status == 0:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.json_response(_status(fault), status=fault.status, headers=fault.headers)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {key: value for key, value in request.headers.items() if key.lower() not in {*_HOP, "authorization"}}
        url = f"{self._plane.url}{request.path_qs}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method, url, headers=headers, data=await request.read() or None, timeout=timeout
        ) as upstream:
            kept = {key: value for key, value in upstream.headers.items() if key.lower() not in _HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                if is_watch(request) and self.decide(request, True) is not None:
                    self.faults += 1
                    await _hang()
                await response.write(chunk)
            await response.write_eof()
            return response


def is_watch(request: web.Request) -> bool:
    return request.query.get("watch") == "true"


def _status(fault: Fault) -> dict[str, object]:
    words = HTTPStatus(fault.status).phrase
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "message": f"injected: {words}",
        "reason": fault.reason,
        "code": fault.status,
    }


async def _say_gone(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    event = {"type": "ERROR", "object": _status(answer(410, "Expired"))}
    await response.write(json.dumps(event).encode() + b"\n")
    return response


async def _say_nothing(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await _hang()
    return response


async def _hang() -> None:
    """Until the client has had enough: then this handler is cancelled."""
    await asyncio.Event().wait()

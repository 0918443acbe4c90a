"""kopf as the watcher, before a server that says what a test wants of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kopf
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from marlaas_operator.cluster import Body, Resource, Unavailable
from marlaas_operator.cluster.api_server import ApiServer
from marlaas_operator.cluster.resources import CRDS, KINDS, NAMESPACES, OWNED
from marlaas_operator.handlers import watch_once

OURS = (*KINDS, *OWNED)
SERVED = (*OURS, NAMESPACES, CRDS)  # kopf begins nothing before it has found the last two


class Server:
    """Lists what it serves, in which there may be gaps, and is otherwise silent. asked: kinds that were listed or watched."""

    def __init__(self, *unlisted: str) -> None:
        self._unlisted = unlisted
        self.asked: set[str] = set()
        self.every = asyncio.Event()
        self.url = ""

    @property
    def gateway(self) -> ApiServer:
        configuration = Configuration()
        configuration.host = self.url
        return ApiServer(configuration)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if path == "api":
            return web.json_response({"versions": ["v1"]})
        if path == "apis":
            return web.json_response({"groups": [_group(one) for one in SERVED if one.group]})
        served = [one for one in SERVED if path == one.path().strip("/").rpartition("/")[0]]
        if served:
            listed = [one for one in served if one.plural not in self._unlisted]
            return web.json_response({"resources": [_entry(one) for one in listed]})
        self._note(path.rpartition("/")[2])
        if request.query.get("watch"):
            await asyncio.Event().wait()
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    def _note(self, plural: str) -> None:
        self.asked.add(plural)
        if {one.plural for one in OURS} <= self.asked:
            self.every.set()


def _group(one: Resource) -> Body:
    version = {"groupVersion": one.api_version, "version": one.version}
    return {"name": one.group, "versions": [version], "preferredVersion": version}


def _entry(one: Resource) -> Body:
    verbs = ["list", "watch", "patch"]
    return {
        "name": one.plural,
        "singularName": one.kind.lower(),
        "kind": one.kind,
        "namespaced": one.namespaced,
        "verbs": verbs,
    }


def ignored(resource: Resource, kind: str | None, body: Body) -> None:
    """Nothing ever happens."""


async def test_a_kind_that_is_not_listed_yet_ends_the_watching_which_is_begun_anew() -> None:
    async with asyncio.timeout(60), Server("rljobs", "pods").running() as server:
        with pytest.raises(Unavailable, match="does not serve rljobs, pods yet"):
            await watch_once(ignored, server.gateway, asyncio.Event(), 45.0)
    assert server.asked == set()


async def test_what_is_listed_is_watched_until_it_is_told_to_stop() -> None:
    halt = asyncio.Event()
    async with asyncio.timeout(60), Server().running() as server:
        watching = asyncio.create_task(watch_once(ignored, server.gateway, halt, 45.0))
        await server.every.wait()
        halt.set()
        await watching


async def test_a_watch_that_is_stopped_before_the_api_server_answers_ends() -> None:
    halt = asyncio.Event()
    halt.set()
    gateway = Server().gateway
    gateway.configuration.host = "http://127.0.0.1:9"
    async with asyncio.timeout(10):
        await watch_once(ignored, gateway, halt, 45.0)


def test_every_kind_that_the_operator_knows_has_a_handler() -> None:
    registry = kopf.get_default_registry()
    selectors = {handler.selector for handler in registry._watching.get_all_handlers()}
    assert {(one.group, one.version, one.any_name) for one in selectors} == {
        (one.group, one.version, one.plural) for one in OURS
    }

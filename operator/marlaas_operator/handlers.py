"""kopf, as the watcher: every event of our kinds and of what we own becomes something seen. The only module that imports kopf.

kopf writes nothing: no finalizers, annotations, events or peering of its own. It has a thread and an event loop to itself, for it cancels
whatever it finds beside it when it ends; when it fails, it is started anew. A watch ends after `watch_s` and goes on from where it was, so that
one that has silently died is noticed. kopf lists before it watches and does not say what went before: `begun` is told.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights  # where kopf notes what it watches; it tells nobody else

from marlaas_operator.cluster import Body, Resource, Unavailable, target_of
from marlaas_operator.cluster.api_server import ApiServer, Login
from marlaas_operator.cluster.resources import KINDS, OWNED
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.resync import MANAGED
from marlaas_operator.watching import Told, Watcher

WATCH_S = 45.0
_NAME = "marlaas-operator"  # left to itself, kopf asks for the name of our user, who in a pod has none
_GRACE_S = 5.0

Begun = Callable[[Resource], None]
"""Told a kind whose watch begins: what went before it did, it does not say."""

Happened = Callable[[Resource, str | None, Body], None]
"""Told what kopf saw, in kopf's thread: the kind, the event's type (None: listed), the object."""


async def watch(cache: ObjectCache, begun: Begun, told: Told, gateway: ApiServer, watch_s: float = WATCH_S) -> None:
    """Watch until cancelled. told: what is wrong with the watching, an empty text when it goes well again."""
    loop = asyncio.get_running_loop()

    def see(resource: Resource, kind: str | None, body: Body) -> None:
        if kind == "DELETED":
            meta = body["metadata"]
            cache.lose(target_of(body), meta["uid"], int(meta["resourceVersion"]))
            return
        if kind is None:
            begun(resource)
        cache.see(body)

    def happened(resource: Resource, kind: str | None, body: Body) -> None:
        loop.call_soon_threadsafe(see, resource, kind, body)

    def tell(words: str) -> None:
        told(words)
        for resource in (*KINDS, *OWNED):
            begun(resource)

    async def once(halt: asyncio.Event) -> None:
        await _watch_once(happened, gateway, halt, watch_s)

    _quieten()
    await Watcher(once, tell).run()


async def _watch_once(happened: Happened, gateway: ApiServer, halt: asyncio.Event, watch_s: float) -> None:
    registry, insights = kopf.OperatorRegistry(), Insights()
    kopf.on.login(registry=registry)(_login(gateway))
    for resource in (*KINDS, *OWNED):
        _register(registry, resource, happened)
    looking = asyncio.create_task(_unserved(insights, halt), name="unserved kinds")
    try:
        await kopf.operator(
            registry=registry,
            settings=_settings(watch_s),
            insights=insights,
            standalone=True,
            clusterwide=True,
            stop_flag=halt,
            identity=_NAME,
        )
    finally:
        looking.cancel()
    if looking.done() and not looking.cancelled():
        raise Unavailable(f"the API server does not list {', '.join(looking.result())} among what it serves")


async def _unserved(insights: Insights, halt: asyncio.Event) -> list[str]:
    """Kinds that the API server did not list when kopf asked what there is, having ended the watching; waits for ever if there are none.

    kopf asks once, and never watches what was not listed then: kinds that were only just installed may be served before they are listed.
    """
    await insights.ready_resources.wait()
    listed = {(found.group, found.version, found.plural) for found in insights.watched_resources}
    lacking = [one.plural for one in (*KINDS, *OWNED) if (one.group, one.version, one.plural) not in listed]
    if not lacking:
        await asyncio.Event().wait()
    halt.set()
    return lacking


def _register(registry: kopf.OperatorRegistry, resource: Resource, happened: Happened) -> None:
    async def seen(event: Any, **_: Any) -> None:
        happened(
            resource,
            event["type"],
            {**event["object"], "apiVersion": resource.api_version, "kind": resource.kind},
        )

    where = (resource.group, resource.version, resource.plural)
    kopf.on.event(*where, registry=registry, id=f"seen-{resource.plural}")(seen)


class _NothingToCompare(kopf.DiffBaseStorage):  # type: ignore[misc]
    """kopf would copy every object to compare it with an earlier self; nobody here asks for that."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


class _NothingToRemember(kopf.ProgressStorage):  # type: ignore[misc]
    """No handler of ours has progress to be kept on an object."""

    def fetch(self, *, key: Any, body: Any) -> Any:
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        return None

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        return None

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def _settings(watch_s: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = _NothingToCompare()
    settings.persistence.progress_storage = _NothingToRemember()
    settings.queueing.idle_timeout = 0.5
    settings.watching.server_timeout = int(watch_s)
    settings.watching.client_timeout = watch_s + _GRACE_S
    settings.watching.inactivity_timeout = watch_s + _GRACE_S
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 20.0
    settings.networking.connect_timeout = 5.0
    for resource in OWNED:
        key = (resource.group, resource.version, resource.plural)
        settings.watching.label_selectors[key] = MANAGED
    return settings


def _login(gateway: ApiServer) -> Callable[..., Any]:
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found: Login = await gateway.login()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=not found.verify,
            certificate_path=found.certificate_path,
            private_key_path=found.key_path,
            scheme="Bearer" if found.token else None,
            token=found.token,
        )

    return login


def _quieten() -> None:
    """kopf tells of every event, and of the signals that it leaves to us."""
    for name, level in (("kopf", logging.WARNING), ("kopf.objects", logging.ERROR), ("kopf._core", logging.ERROR)):
        logging.getLogger(name).setLevel(level)

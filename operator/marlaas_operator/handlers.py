"""kopf handlers: every event of the kinds below goes into the object cache. The only module that imports kopf.

kopf watches and writes nothing: no finalizers, annotations, events or peering; docs/explanation/architecture.md ("The control plane") gives the reasons. It runs in a
thread and an event loop of its own, since it cancels every other task of its loop when it ends, and `Watcher` restarts it with backoff. A
watch ends after `watch_s` and resumes, so that a dead connection is noticed.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kopf

from marlaas_operator.cluster import Body, Resource, Unavailable, target_of
from marlaas_operator.cluster.api_server import ApiServer, Login
from marlaas_operator.cluster.resources import KINDS, MANAGED, OWNED, slim, version_of
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.watching import Report, Watcher

WATCH_S = 45.0
_NAME = "marlaas-operator"  # without an identity, kopf reads the name of our user, which has none in a pod
_GRACE_S = 5.0
_RESOURCES = {(one.group, one.version, one.plural): one for one in (*KINDS, *OWNED)}

WatchBegun = Callable[[Resource], None]
"""Called with a kind whose watch begins. kopf lists before it watches and does not report what was deleted before."""

Sink = Callable[[Resource, str | None, Body], None]
"""Called in kopf's thread with the kind, the event's type (None: listed) and the object."""


class _NoDiffBase(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Stores nothing: kopf would copy every object to compare it with its previous version, which no handler needs."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """Stores nothing: no handler has progress to be kept on an object."""

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


@kopf.on.startup()  # type: ignore[untyped-decorator]
async def configure(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Make kopf watch and never write."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    settings.queueing.idle_timeout = 0.5
    settings.watching.server_timeout = int(memo.watch_s)
    settings.watching.client_timeout = memo.watch_s + _GRACE_S
    settings.watching.inactivity_timeout = memo.watch_s + _GRACE_S
    settings.watching.chunk_size = 50  # an answer is parsed as a whole, and an object may have 256 KiB
    settings.networking.request_timeout = 20.0
    settings.networking.connect_timeout = 5.0
    for resource in OWNED:
        settings.watching.label_selectors[resource.group, resource.version, resource.plural] = MANAGED


@kopf.on.login()  # type: ignore[untyped-decorator]
async def login(memo: kopf.Memo, **_: Any) -> kopf.ConnectionInfo:
    """Log in as the operator's own client does."""
    found: Login = await memo.login()
    return kopf.ConnectionInfo(
        server=found.server,
        ca_path=found.ca_path,
        insecure=not found.verify,
        certificate_path=found.certificate_path,
        private_key_path=found.key_path,
        scheme="Bearer" if found.token else None,
        token=found.token,
    )


@kopf.on.event("marlaas.dev", "v1alpha1", "rljobs")  # type: ignore[untyped-decorator]
@kopf.on.event("marlaas.dev", "v1alpha1", "modelpools")  # type: ignore[untyped-decorator]
@kopf.on.event("marlaas.dev", "v1alpha1", "tenants")  # type: ignore[untyped-decorator]
@kopf.on.event("apps", "v1", "deployments")  # type: ignore[untyped-decorator]
@kopf.on.event("apps", "v1", "statefulsets")  # type: ignore[untyped-decorator]
@kopf.on.event("", "v1", "services")  # type: ignore[untyped-decorator]
@kopf.on.event("policy", "v1", "poddisruptionbudgets")  # type: ignore[untyped-decorator]
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies")  # type: ignore[untyped-decorator]
@kopf.on.event("", "v1", "configmaps")  # type: ignore[untyped-decorator]
@kopf.on.event("", "v1", "serviceaccounts")  # type: ignore[untyped-decorator]
@kopf.on.event("", "v1", "pods")  # type: ignore[untyped-decorator]
async def observed(event: Any, resource: Any, memo: kopf.Memo, **_: Any) -> None:
    """Pass an event on to the cache."""
    kind = _RESOURCES[resource.group, resource.version, resource.plural]
    memo.sink(kind, event["type"], slim({**event["object"], "apiVersion": kind.api_version, "kind": kind.kind}))


async def watch(
    cache: ObjectCache, begun: WatchBegun, report: Report, gateway: ApiServer, watch_s: float = WATCH_S
) -> None:
    """Watch until cancelled. report: called with the error that ended a watch, with an empty text once the watch works again."""
    loop = asyncio.get_running_loop()
    into_cache = cache_sink(cache, begun)

    def sink(resource: Resource, kind: str | None, body: Body) -> None:
        loop.call_soon_threadsafe(into_cache, resource, kind, body)

    def restarted(error: str) -> None:
        report(error)
        for resource in (*KINDS, *OWNED):
            begun(resource)

    async def once(halt: asyncio.Event) -> None:
        await watch_once(sink, gateway, halt, watch_s)

    _quieten()
    await Watcher(once, restarted).run()


def cache_sink(cache: ObjectCache, begun: WatchBegun) -> Sink:
    """Return the sink that stores events in the cache; call it in the cache's event loop."""

    def store(resource: Resource, kind: str | None, body: Body) -> None:
        if kind == "DELETED":
            cache.lose(target_of(body), body["metadata"]["uid"], version_of(body))
            return
        if kind is None:
            begun(resource)
        cache.see(body)

    return store


async def watch_once(sink: Sink, gateway: ApiServer, halt: asyncio.Event, watch_s: float) -> None:
    """Run kopf until `halt` is set.

    Raises:
        Unavailable: the API server does not list a kind yet. kopf looks once at its start, and never watches a kind that was missing then.
    """
    discovery, stopping = asyncio.create_task(_unserved(gateway)), asyncio.create_task(halt.wait())
    try:
        await asyncio.wait({discovery, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if halt.is_set():
            return
        if unserved := discovery.result():
            raise Unavailable(f"the API server does not serve {', '.join(unserved)} yet")
    finally:
        discovery.cancel()
        stopping.cancel()
    await kopf.operator(
        memo=kopf.Memo(sink=sink, login=gateway.login, watch_s=watch_s),
        clusterwide=True,
        standalone=True,
        stop_flag=halt,
        identity=_NAME,
    )


async def _unserved(gateway: ApiServer) -> list[str]:
    """Return the kinds that the API server does not serve.

    Uses a connection of its own, because the gateway's belongs to another event loop.
    """
    own = ApiServer(gateway.configuration)
    try:
        return [resource.plural for resource in await own.unserved((*KINDS, *OWNED))]
    finally:
        await own.close()


def _quieten() -> None:
    """Set log levels: kopf would log every event, and the signals that it leaves to us."""
    for name, level in (("kopf", logging.WARNING), ("kopf.objects", logging.WARNING), ("kopf._core", logging.ERROR)):
        logging.getLogger(name).setLevel(level)

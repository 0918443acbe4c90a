"""kopf handlers: every event of the kinds below goes into the object cache. The only module that imports kopf.

kopf watches and writes nothing: no finalizers, annotations, events or peering; docs/explanation/architecture.md ("The control plane") gives the reasons. It runs in the operator's event loop; if it ends, `Watches`
starts it again, with backoff. A watch ends after `watch_s` and resumes, so that a dead connection is noticed.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kopf

from marlaas_api.background import set_on_signals
from marlaas_operator.cluster import Body, Resource, Unavailable, target_of
from marlaas_operator.cluster.api_server import ApiServer, Login
from marlaas_operator.cluster.resources import KINDS, MANAGED, OWNED, slim, version_of
from marlaas_operator.object_cache import ObjectCache

log = logging.getLogger(__name__)

WATCH_S = 45.0
_NAME = "marlaas-operator"  # without an identity, kopf reads the name of our user, which has none in a pod
_GRACE_S = 5.0
_RESOURCES = {(one.group, one.version, one.plural): one for one in (*KINDS, *OWNED)}
SETTLED_S = 10.0
"""A run of kopf that lasted this long counts as working."""
_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

WatchBegun = Callable[[Resource], None]
"""Called with a kind whose watch begins. kopf lists before it watches and does not report what was deleted before."""

Sink = Callable[[Resource, str | None, Body], None]
"""Called with the kind, the event's type (None: listed) and the object."""

Report = Callable[[str], None]
"""Called with the error that ended the watches; with an empty text once they work again."""


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
    settings.process.ultimate_exiting_timeout = None  # kopf would kill the process ten minutes after its own end
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


@dataclass(frozen=True, slots=True)
class Watches:
    """kopf in this event loop. stop: set by the signals of this process, whose handlers kopf would replace by its own."""

    gateway: ApiServer
    stop: asyncio.Event
    watch_s: float = WATCH_S

    async def run(self, cache: ObjectCache, begun: WatchBegun, report: Report) -> None:
        """Watch until cancelled; begin again, with backoff, whenever kopf ends."""
        _quieten()
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            settled, begun_at = loop.call_later(SETTLED_S, report, ""), loop.time()
            error = await self._until_it_ends(cache_sink(cache, begun))
            settled.cancel()
            failures = 0 if loop.time() - begun_at >= SETTLED_S else failures + 1
            wait_s = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
            log.warning("the watches ended (%s); restart in %.1f s", error, wait_s)
            report(error)
            for resource in (*KINDS, *OWNED):
                begun(resource)
            await asyncio.sleep(wait_s)

    async def _until_it_ends(self, sink: Sink) -> str:
        """Run kopf once, and return the error that ended it."""
        try:
            await self._once(sink)
        # The watches are started again after any error. A CancelledError from inside kopf is no cancellation of this task.
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return f"{type(error).__name__}: {error}"
        return "without an error"

    async def _once(self, sink: Sink) -> None:
        """Run kopf until it ends.

        Raises:
            Unavailable: the API server does not list a kind yet. kopf looks once at its start, and never watches a kind that was missing then.
        """
        if unserved := await self.gateway.unserved((*KINDS, *OWNED)):
            names = ", ".join(resource.plural for resource in unserved)
            raise Unavailable(f"the API server does not serve {names} yet")
        halt = asyncio.Event()
        tasks = await kopf.spawn_tasks(
            memo=kopf.Memo(sink=sink, login=self.gateway.login, watch_s=self.watch_s),
            clusterwide=True,
            standalone=True,
            stop_flag=halt,
            identity=_NAME,
        )
        set_on_signals(asyncio.get_running_loop(), self.stop)
        running = asyncio.ensure_future(kopf.run_tasks(tasks, ignored=_AllTasks()))
        try:
            await asyncio.shield(running)
        finally:
            halt.set()
            await asyncio.wait({running})


class _AllTasks(frozenset["asyncio.Task[Any]"]):
    """Contains every task: after its own, kopf would cancel all tasks of the loop that are not ignored."""

    def __contains__(self, _: object) -> bool:
        return True


def cache_sink(cache: ObjectCache, begun: WatchBegun) -> Sink:
    """Return the sink that stores events in the cache."""

    def store(resource: Resource, kind: str | None, body: Body) -> None:
        if kind == "DELETED":
            cache.lose(target_of(body), body["metadata"]["uid"], version_of(body))
            return
        if kind is None:
            begun(resource)
        cache.see(body)

    return store


def _quieten() -> None:
    """Set log levels: kopf would log every event, and the signals that it leaves to us."""
    for name, level in (("kopf", logging.WARNING), ("kopf.objects", logging.WARNING), ("kopf._core", logging.ERROR)):
        logging.getLogger(name).setLevel(level)

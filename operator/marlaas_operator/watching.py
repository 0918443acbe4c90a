"""What keeps the object cache current: a supervised watch, lists that confirm it, and the sweep of orphaned documents.

The watch runs in its own thread and event loop, and is restarted whenever it ends. Kinds are listed at the start,
every ten minutes, and when a watch begins: a new watch does not report earlier deletions, a later list shows them.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from marlaas_api.errors import InvalidInput, MarlaasError, Retryable
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.cluster import Cluster, Forbidden, NotFound, Resource, Target
from marlaas_operator.cluster.resources import KINDS, MANAGED, OWNED, RLJOBS
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.plan import WriteDocument
from marlaas_operator.policies.job import plan_orphan

log = logging.getLogger(__name__)

EVERY_S = 600.0
SWEEP_EVERY_S = 60.0
FIRST_S = 5.0
_SOON_S = 3.0
_RETRY_S = 2.0
SETTLED_S = 10.0
_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

Once = Callable[[asyncio.Event], Awaitable[None]]
"""Watches until the event, which belongs to the watcher's loop, is set."""

Report = Callable[[str], None]
"""Called in the caller's loop with the error that ended the watch; with an empty text once the watch works again."""


class Watcher:
    """Runs `once` again and again until cancelled. settled_s: a watch that lasted this long counts as working."""

    def __init__(self, once: Once, report: Report, settled_s: float = SETTLED_S) -> None:
        self._once = once
        self._report = report
        self._settled_s = settled_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="watcher") as thread:
            try:
                await loop.run_in_executor(thread, self._restart_for_ever, loop)
            finally:
                self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._inner is not None:
                loop, halt = self._inner
                with contextlib.suppress(RuntimeError):  # the loop has just been closed
                    loop.call_soon_threadsafe(halt.set)

    def _restart_for_ever(self, caller: asyncio.AbstractEventLoop) -> None:
        failures = 0
        while not self._stopped.is_set():
            settled, error = self._watch_once(caller)
            failures = 0 if settled else failures + 1
            wait_s = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
            if not self._stopped.is_set():
                log.warning("the watches ended (%s); restart in %.1f s", error, wait_s)
                caller.call_soon_threadsafe(self._report, error)
                self._stopped.wait(wait_s)

    def _watch_once(self, caller: asyncio.AbstractEventLoop) -> tuple[bool, str]:
        """Run the watch once; return whether it lasted `settled_s`, and the error text."""
        settled = threading.Event()

        async def watch() -> None:
            halt = asyncio.Event()
            loop = asyncio.get_running_loop()
            with self._lock:
                self._inner = loop, halt
            if self._stopped.is_set():
                return

            def settle() -> None:
                settled.set()
                caller.call_soon_threadsafe(self._report, "")

            timer = loop.call_later(self._settled_s, settle)
            try:
                await self._once(halt)
            finally:
                timer.cancel()

        try:
            asyncio.run(watch())
        # Thread boundary: the watch is restarted after any error. A CancelledError from inside would be mistaken for our own cancellation.
        except (Exception, asyncio.CancelledError) as error:
            return settled.is_set(), f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._inner = None
        return settled.is_set(), "without an error"


class Resync:
    """Lists that keep the object cache current. synced: set once every kind was listed."""

    def __init__(self, cluster: Cluster, cache: ObjectCache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._requested: set[Resource] = set()
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()

    async def first(self) -> None:
        """List every kind; retry until the API server answers.

        Raises:
            InvalidInput: our kinds are not installed, or listing is forbidden.
        """
        for resource in (*KINDS, *OWNED):
            await self._list(resource)
        self.synced.set()

    async def run(self) -> None:
        """List until cancelled.

        Requested kinds are listed after `_SOON_S`; all kinds after `FIRST_S` and then every ten minutes.
        """
        at = time.monotonic() + FIRST_S
        while True:
            try:
                async with asyncio.timeout(max(at - time.monotonic(), 0.0)):
                    await self._changed.wait()
                await asyncio.sleep(_SOON_S)
                requested, self._requested = self._requested, set()
                self._changed.clear()
            except TimeoutError:
                at, requested = time.monotonic() + EVERY_S, {*KINDS, *OWNED}
            for resource in requested:
                if not await self._try_again(resource):
                    self.request(resource)

    def request(self, resource: Resource) -> None:
        """Request a list of a kind whose watch has begun."""
        self._requested.add(resource)
        self._changed.set()

    async def _list(self, resource: Resource) -> None:
        while True:
            if await self._try(resource):
                return
            await asyncio.sleep(_RETRY_S)

    async def _try_again(self, resource: Resource) -> bool:
        """List a kind; log an error that would stop a starting operator, and return False.

        A starting API server may refuse a request that it allows a second later.
        """
        try:
            return await self._try(resource)
        except InvalidInput as error:
            log.error("list of %s failed: %s (retry soon)", resource.plural, error)
            return False

    async def _try(self, resource: Resource) -> bool:
        known = self._cache.known(resource)
        try:
            bodies = await self._cluster.list(resource, labels="" if resource in KINDS else MANAGED)
        except NotFound as error:
            text = f"{error}; are the custom resource definitions installed? Install them: kubectl apply -f crds/"
            raise InvalidInput(text) from error
        except Forbidden as error:
            raise InvalidInput(f"{error}; the chart's ClusterRole of the operator allows it") from error
        except Retryable as error:
            log.warning("list of %s failed: %s (retry soon)", resource.plural, error)
            return False
        if restored := self._cache.replace(bodies, known):
            log.warning("the API server was restored to an older state: %d %s are older now", restored, resource.plural)
        return True


async def sweep(cluster: Cluster, cache: ObjectCache, documents: JobDocuments, health: BusHealth) -> None:
    """Mark the documents of jobs that no longer exist as deleted, until cancelled.

    The orchestrator then forgets those jobs.
    """
    while True:
        for key in documents.keys() if health.state.available and health.state.synced else ():
            try:
                await _sweep_one(cluster, cache, documents, key)
            except MarlaasError as error:
                log.warning("sweep of document %s failed: %s", key, error)
        await asyncio.sleep(SWEEP_EVERY_S)


async def _sweep_one(cluster: Cluster, cache: ObjectCache, documents: JobDocuments, key: str) -> None:
    """Mark one document as deleted if the API server confirms that its job is gone; the cache alone may lag."""
    document = documents.document(key)
    if document is None or document.deleted:
        return
    target = Target(RLJOBS, document.namespace, document.job)
    body = cache.get(target)
    if body is not None and body["metadata"]["uid"] == document.uid:
        return
    try:
        found = await cluster.get(target)
    except NotFound:
        found = None
    if found is None or found["metadata"]["uid"] != document.uid:
        log.info("%s does not exist any more (uid %s); marking its document as deleted", target, document.uid)
        for action in plan_orphan(document).actions:
            if isinstance(action, WriteDocument):
                await documents.write(action)

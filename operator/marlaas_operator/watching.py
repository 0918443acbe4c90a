"""Keep the object cache current beside the watches: lists that confirm them, and the sweep of orphaned documents.

Kinds are listed at the start, every ten minutes, and when a watch begins: a new watch does not report earlier
deletions, a later list shows them.
"""

import asyncio
import logging
import time

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

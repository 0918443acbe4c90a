"""Execution of a plan's actions, one at a time.

Every action may be repeated. Where a concurrent change matters, the request carries the observed uid or
resource version.
"""

from collections.abc import Callable
from typing import Any

from marlaas_operator.cluster import Body, Cluster, Conflict, NotFound, Target
from marlaas_operator.cluster.resources import OWNED, SECRETS
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.plan import Action, AddFinalizer, Apply, Delete, DeleteObject, RemoveFinalizer, WriteDocument

_BY_KIND = {resource.kind: resource for resource in (*OWNED, SECRETS)}


class Performer:
    """Executes actions against the cluster and the bus, and updates the cache with the results."""

    def __init__(self, cluster: Cluster, cache: ObjectCache, documents: JobDocuments) -> None:
        self._cluster = cluster
        self._cache = cache
        self._documents = documents

    async def perform(self, target: Target, action: Action) -> None:
        """Execute one action for the planned object. Raises the errors of `Cluster` and of `JobDocuments.write`."""
        match action:
            case Apply(manifest):
                await self._apply(dict(manifest))
            case Delete(kind, namespace, name, uid):
                gone = Target(_BY_KIND[kind], namespace, name)
                if await self._cluster.delete(gone, uid=uid) and uid is not None:
                    self._cache.lose(gone, uid)
            case DeleteObject(uid):
                await self._cluster.delete(target, uid=uid)
            case AddFinalizer(finalizer):
                await self._finalizers(target, lambda names: [*(n for n in names if n != finalizer), finalizer])
                if self._cache.get(target) is None:  # later actions need the finalizer
                    raise Conflict(f"{target} went before it had our finalizer")
            case RemoveFinalizer(finalizer):
                await self._finalizers(target, lambda names: [name for name in names if name != finalizer])
            case WriteDocument():
                await self._documents.write(action)

    async def _apply(self, manifest: Body) -> None:
        after = await self._cluster.apply(manifest)
        if manifest["kind"] != SECRETS.kind:  # Secrets are never read, hence not cached
            self._cache.see(after, own=True)

    async def _finalizers(self, target: Target, change: Callable[[list[str]], list[str]]) -> None:
        """Replace the list of finalizers, on condition of the observed resource version.

        The condition is needed because a merge patch replaces whole lists.
        """
        body = self._cache.get(target)
        if body is None:
            return
        meta: dict[str, Any] = body["metadata"]
        wanted = {"finalizers": change(meta.get("finalizers") or []), "resourceVersion": meta["resourceVersion"]}
        try:
            after = await self._cluster.patch(target, {"metadata": wanted})
        except NotFound:
            self._cache.lose(target, meta["uid"])
            return
        if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
            self._cache.lose(target, meta["uid"])
        else:
            self._cache.see(after, own=True)

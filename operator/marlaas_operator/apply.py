"""A plan's actions, performed one at a time. Each may be repeated; each is a condition on what was observed where that matters."""

from collections.abc import Callable
from typing import Any

from marlaas_operator.bus_view import BusView
from marlaas_operator.cluster import Body, Cluster, Conflict, NotFound, Target
from marlaas_operator.cluster.resources import OWNED, SECRETS
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.plan import Action, AddFinalizer, Apply, Delete, DeleteObject, RemoveFinalizer, WriteDocument

_BY_KIND = {resource.kind: resource for resource in (*OWNED, SECRETS)}


class Performer:
    """Performs actions."""

    def __init__(self, cluster: Cluster, cache: ObjectCache, bus: BusView) -> None:
        self._cluster = cluster
        self._cache = cache
        self._bus = bus

    async def perform(self, target: Target, action: Action) -> None:
        """Do one thing for the planned object. Raises as the cluster and the bus do."""
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
                if self._cache.get(target) is None:  # nothing may be made for it that its deletion would not undo
                    raise Conflict(f"{target} went before it had our finalizer")
            case RemoveFinalizer(finalizer):
                await self._finalizers(target, lambda names: [name for name in names if name != finalizer])
            case WriteDocument():
                await self._bus.write(action)

    async def _apply(self, manifest: Body) -> None:
        after = await self._cluster.apply(manifest)
        if manifest["kind"] != SECRETS.kind:  # what is never read is not remembered either
            self._cache.see(after, own=True)

    async def _finalizers(self, target: Target, change: Callable[[list[str]], list[str]]) -> None:
        """A list is replaced whole, hence only at the version that was observed."""
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

"""A plan's actions, performed one at a time. Each may be repeated; each is a condition on what was observed where that matters."""

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from marlaas_operator.bus_view import BusView
from marlaas_operator.cluster import Body, Cluster, NotFound, Target, target_of
from marlaas_operator.cluster.resources import OWNED, SECRETS
from marlaas_operator.plan import Action, AddFinalizer, Apply, Delete, DeleteObject, RemoveFinalizer, WriteDocument
from marlaas_operator.watched import Watched

log = logging.getLogger(__name__)

SECRET_EVERY_S = 600.0
_BY_KIND = {resource.kind: resource for resource in (*OWNED, SECRETS)}


class Performer:
    """Performs actions. now: monotonic seconds. told: called with the kind and the verb of everything that was done."""

    def __init__(self, cluster: Cluster, watched: Watched, bus: BusView, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._watched = watched
        self._bus = bus
        self._now = now
        self._secrets: dict[Target, tuple[str, float]] = {}

    async def perform(self, target: Target, action: Action) -> None:
        """Do one thing for the planned object. Raises as the cluster and the bus do."""
        match action:
            case Apply(manifest):
                await self._apply(dict(manifest))
            case Delete(kind, namespace, name, uid):
                gone = Target(_BY_KIND[kind], namespace, name)
                self._secrets.pop(gone, None)
                await self._cluster.delete(gone, uid=uid)
            case DeleteObject(uid):
                await self._cluster.delete(target, uid=uid)
            case AddFinalizer(finalizer):
                await self._finalizers(target, lambda names: [*(n for n in names if n != finalizer), finalizer])
            case RemoveFinalizer(finalizer):
                await self._finalizers(target, lambda names: [name for name in names if name != finalizer])
            case WriteDocument():
                await self._bus.write(action)

    async def _apply(self, manifest: Body) -> None:
        """Secrets cannot be observed: the same one is applied again only after ten minutes."""
        if manifest["kind"] != SECRETS.kind:
            self._watched.see(await self._cluster.apply(manifest), own=True)
            return
        target, digest = target_of(manifest), _digest(manifest)
        known, applied_at = self._secrets.get(target, ("", 0.0))
        if known == digest and self._now() < applied_at + SECRET_EVERY_S:
            return
        await self._cluster.apply(manifest)
        self._secrets[target] = digest, self._now()

    async def _finalizers(self, target: Target, change: Callable[[list[str]], list[str]]) -> None:
        """A list is replaced whole, hence only at the version that was observed."""
        body = self._watched.get(target)
        if body is None:
            return
        meta: dict[str, Any] = body["metadata"]
        wanted = {"finalizers": change(meta.get("finalizers") or []), "resourceVersion": meta["resourceVersion"]}
        try:
            after = await self._cluster.patch(target, {"metadata": wanted})
        except NotFound:
            self._watched.lose(target, meta["uid"])
            return
        if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
            self._watched.lose(target, meta["uid"])
        else:
            self._watched.see(after, own=True)


def _digest(manifest: Body) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()

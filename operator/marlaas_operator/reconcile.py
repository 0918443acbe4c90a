"""Reconcile of one object: observe, plan, execute the actions, write the status, emit the events, in this order.

Invariant: a crash between any two effects is harmless, because the next plan starts from the observed state.
The status is one write. Events come last: a crash may lose one, but never emits one twice.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from marlaas_api.errors import MarlaasError
from marlaas_api.failpoints import failpoint
from marlaas_operator.cluster import Body, Cluster, Conflict, NotFound, Target
from marlaas_operator.cluster.resources import MODELPOOLS, OWNED, RLJOBS, SECRETS
from marlaas_operator.installation import Installation
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.observe import Observer
from marlaas_operator.plan import (
    Action,
    AddFinalizer,
    Apply,
    Delete,
    DeleteObject,
    Plan,
    RemoveFinalizer,
    WriteDocument,
)
from marlaas_operator.policies.conditions import event_bodies
from marlaas_operator.policies.job import plan_job, soonest
from marlaas_operator.policies.pool import plan_pool
from marlaas_operator.policies.tenant import plan_tenant
from marlaas_operator.work_queue import REFUSED_AGAIN_S, FailureBackoff, is_refusal, is_transient

log = logging.getLogger(__name__)

FIGURES_EVERY_S = 1.0
_ASIDE_AGAIN_S = 2.0
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
                    raise Conflict(f"{target} was deleted before it had our finalizer")
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


@dataclass(frozen=True, slots=True)
class ReconcilerDependencies:
    """Dependencies of a reconcile. instance: reporter name in events. now: unix seconds."""

    cluster: Cluster
    cache: ObjectCache
    observer: Observer
    performer: Performer
    installation: Installation
    instance: str
    now: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class _Aside:
    """Error of an exporter's action, which is not repeated before `until` (unix seconds)."""

    error: str
    until: float


class Reconciler:
    """Reconciles objects, one per call."""

    def __init__(self, dependencies: ReconcilerDependencies) -> None:
        self._deps = dependencies
        self._status_at: dict[Target, float] = {}
        self._backoff = FailureBackoff()
        self._aside: dict[Target, _Aside] = {}

    async def __call__(self, target: Target) -> float | None:
        """Reconcile one object; return after how many seconds to requeue it, None to wait for a change.

        Raises:
            MarlaasError: the reconcile must be retried.
        """
        body = self._deps.cache.get(target)
        if body is None:
            self._forget(target)
            return None
        try:
            return await self._reconcile(target, body)
        except Conflict:
            await self._reread(target, body)
            raise

    async def _reconcile(self, target: Target, body: Body) -> float | None:
        plan = self._plan(target)
        if plan is None:
            return None
        failpoint("operator.reconcile.planned")
        deferred_s = self._backoff.deferred_s(target, plan.actions, self._deps.now())
        error = await self._act(target, plan) if deferred_s is None else None
        if error is not None or (deferred_s is None and self._backoff.clear(target)):
            plan = self._plan_after(target, error)
            hold = tuple(
                action for action in plan.actions if isinstance(action, WriteDocument) and action.document.is_held
            )
            if hold:  # frees the job's slots, so it does not wait with the refused actions
                await self._act(target, Plan(hold))
        aside_s = await self._act_aside(target, plan)
        if aside_s is not None:  # the status tells the refusal
            plan = replace(self._plan(target) or plan, requeue_s=plan.requeue_s)
        early_s = await self._report(target, body, plan)
        if error is not None and not is_refusal(error):
            raise error
        return soonest(plan.requeue_s, deferred_s if error is None else REFUSED_AGAIN_S, early_s, aside_s)

    def _plan(self, target: Target) -> Plan | None:
        deps = self._deps
        error = self._backoff.reportable(target, deps.now())
        if target.resource == RLJOBS:
            aside = self._aside.get(target)
            job = deps.observer.job(
                target, error, self._backoff.is_refused(target), aside.error if aside is not None else ""
            )
            return plan_job(job, deps.installation, deps.now()) if job is not None else None
        if target.resource == MODELPOOLS:
            pool = deps.observer.pool(target, error)
            return plan_pool(pool, deps.installation, deps.now()) if pool is not None else None
        tenant = deps.observer.tenant(target)
        return plan_tenant(tenant, deps.installation, deps.now()) if tenant is not None else None

    async def _act(self, target: Target, plan: Plan) -> MarlaasError | None:
        """Execute the actions; return the error that stopped them, None if all succeeded.

        Raises:
            MarlaasError: a transient error, which has not lasted long enough to be reported in the status.
        """
        try:
            for action in plan.actions:
                await self._deps.performer.perform(target, action)
                failpoint(f"operator.reconcile.after_{_named(action)}")
        except MarlaasError as error:
            self._backoff.record(target, error, self._deps.now())
            if is_transient(error) and self._backoff.reportable(target, self._deps.now()) is None:
                raise
            return error
        return None

    async def _act_aside(self, target: Target, plan: Plan) -> float | None:
        """Execute the actions for the exporter; an error stops only these.

        Returns:
            After how many seconds to try again what failed; None if nothing did.
        """
        known, now = self._aside.get(target), self._deps.now()
        if known is not None and 0 < known.until - now <= REFUSED_AGAIN_S and plan.aside:
            return known.until - now
        self._aside.pop(target, None)
        try:
            for action in plan.aside:
                await self._deps.performer.perform(target, action)
        except Conflict:
            return _ASIDE_AGAIN_S
        except MarlaasError as error:
            log.warning("actions for the exporter of %s failed: %s", target, error)
            again_s = REFUSED_AGAIN_S if is_refusal(error) else _ASIDE_AGAIN_S
            self._aside[target] = _Aside(str(error), now + again_s)
            return again_s
        return None

    def _plan_after(self, target: Target, error: MarlaasError | None) -> Plan:
        """Plan again after an error, or after an error's end, to get a status that reports it.

        Actions that were refused are not retried for `REFUSED_AGAIN_S`.
        """
        plan = self._plan(target) or Plan()
        if error is not None and is_refusal(error):
            log.warning("actions of %s were refused: %s", target, error)
            self._backoff.defer(target, plan.actions, self._deps.now())
        return plan

    async def _report(self, target: Target, body: Body, plan: Plan) -> float | None:
        """Write the status, then emit the events.

        Returns:
            Seconds to wait if the status has only new numbers and the last write was less than a second ago;
                else None.
        """
        if plan.status is not None:
            early_s = self._status_at.get(target, 0.0) + FIGURES_EVERY_S - self._deps.now()
            if 0 < early_s <= FIGURES_EVERY_S and not plan.urgent:  # longer: the clock was set back
                return early_s
            if not await self._write_status(target, body, dict(plan.status)):
                return None
            failpoint("operator.reconcile.after_status")
        for event in event_bodies(body, plan.events, self._deps.instance, self._deps.now()):
            await self._emit(event)
            failpoint("operator.reconcile.after_event")
        return None

    async def _write_status(self, target: Target, body: Body, status: dict[str, Any]) -> bool:
        """Write the status; return False if the object no longer exists.

        The patch carries the cached resource version, because our own actions have changed it since `body` was
        observed.
        """
        cached = self._deps.cache.get(target)
        if cached is None or cached["metadata"]["uid"] != body["metadata"]["uid"]:
            return False
        patch = {"metadata": {"resourceVersion": cached["metadata"]["resourceVersion"]}, "status": status}
        try:
            after = await self._deps.cluster.patch(target, patch, status=True)
        except NotFound:
            self._deps.cache.lose(target, body["metadata"]["uid"])
            return False
        self._status_at[target] = self._deps.now()
        self._deps.cache.see(after, own=True)
        return True

    async def _emit(self, event: Body) -> None:
        """Create an event; only log an error, because nothing depends on events."""
        try:
            await self._deps.cluster.create(event)
        except Conflict:
            return
        except MarlaasError as error:
            log.debug("event was not created: %s", error)

    async def _reread(self, target: Target, body: Body) -> None:
        """Read the object again after a conflict: the cached body is out of date."""
        try:
            self._deps.cache.see(await self._deps.cluster.get(target))
        except NotFound:
            self._deps.cache.lose(target, body["metadata"]["uid"])

    def _forget(self, target: Target) -> None:
        self._status_at.pop(target, None)
        self._backoff.clear(target)
        self._aside.pop(target, None)


def _named(action: Action) -> str:
    """Return the action's class name and kind, for failpoints."""
    match action:
        case Apply(manifest):
            return f"Apply_{manifest['kind']}"
        case Delete(kind):
            return f"Delete_{kind}"
        case _:
            return type(action).__name__

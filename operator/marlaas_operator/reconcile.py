"""Reconcile of one object: observe, plan, apply, write status, emit events, in this order.

Invariant: a crash between any two effects is harmless, because the next plan starts from the observed state.
The status is one write. Events come last: a crash may lose one, but never emits one twice.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marlaas_api.errors import MarlaasError
from marlaas_api.failpoints import failpoint
from marlaas_operator.apply import Performer
from marlaas_operator.cluster import Body, Cluster, Conflict, NotFound, Target
from marlaas_operator.cluster.resources import MODELPOOLS, RLJOBS
from marlaas_operator.events import event_bodies
from marlaas_operator.failure_backoff import REFUSED_AGAIN_S, FailureBackoff, is_passing, is_refusal
from marlaas_operator.installation import Installation
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.observe import Observer
from marlaas_operator.plan import Action, Apply, Delete, Plan, soonest
from marlaas_operator.policies.job import plan_job
from marlaas_operator.policies.pool import plan_pool
from marlaas_operator.policies.tenant import plan_tenant

log = logging.getLogger(__name__)

FIGURES_EVERY_S = 1.0


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


class Reconciler:
    """Reconciles objects, one per call."""

    def __init__(self, around: ReconcilerDependencies) -> None:
        self._around = around
        self._status_at: dict[Target, float] = {}
        self._backoff = FailureBackoff()

    async def __call__(self, target: Target) -> float | None:
        """Reconcile one object; return after how many seconds to requeue it, None to wait for a change.

        Raises:
            MarlaasError: the reconcile must be retried.
        """
        body = self._around.cache.get(target)
        if body is None:
            self._forget(target)
            return None
        try:
            return await self._reconcile(target, body)
        except Conflict:
            await self._look_at(target, body)
            raise

    async def _reconcile(self, target: Target, body: Body) -> float | None:
        plan = self._plan(target)
        if plan is None:
            return None
        failpoint("operator.reconcile.planned")
        rest_s = self._backoff.rests_s(target, plan.actions, self._around.now())
        error = await self._act(target, plan) if rest_s is None else None
        if error is not None or (rest_s is None and self._backoff.over(target)):
            plan = self._plan_after(target, error)
        early_s = await self._tell(target, body, plan)
        if error is not None and not is_refusal(error):
            raise error
        return soonest(plan.requeue_s, rest_s if error is None else REFUSED_AGAIN_S, early_s)

    def _plan(self, target: Target) -> Plan | None:
        around = self._around
        trouble = self._backoff.told(target, around.now())
        if target.resource == RLJOBS:
            job = around.observer.job(target, trouble)
            return plan_job(job, around.installation, around.now()) if job is not None else None
        if target.resource == MODELPOOLS:
            pool = around.observer.pool(target, trouble)
            return plan_pool(pool, around.installation, around.now()) if pool is not None else None
        tenant = around.observer.tenant(target)
        return plan_tenant(tenant, around.now()) if tenant is not None else None

    async def _act(self, target: Target, plan: Plan) -> MarlaasError | None:
        """Execute the actions; return the error that stopped them, None if all succeeded.

        Raises:
            MarlaasError: a transient error, which has not lasted long enough to be reported in the status.
        """
        try:
            for action in plan.actions:
                await self._around.performer.perform(target, action)
                failpoint(f"operator.reconcile.after_{_named(action)}")
        except MarlaasError as error:
            self._backoff.met(target, error, self._around.now())
            if is_passing(error) and self._backoff.told(target, self._around.now()) is None:
                raise
            return error
        return None

    def _plan_after(self, target: Target, error: MarlaasError | None) -> Plan:
        """Plan again after an error, or after an error's end, to get a status that reports it.

        Actions that were refused are not retried for `REFUSED_AGAIN_S`.
        """
        plan = self._plan(target) or Plan()
        if error is not None and is_refusal(error):
            log.warning("%s: %s", target, error)
            self._backoff.rest(target, plan.actions, self._around.now())
        return plan

    async def _tell(self, target: Target, body: Body, plan: Plan) -> float | None:
        """Write the status, then emit the events.

        Returns:
            Seconds to wait if the status has only new numbers and the last write was less than a second ago;
                else None.
        """
        if plan.status is not None:
            early_s = self._status_at.get(target, 0.0) + FIGURES_EVERY_S - self._around.now()
            if 0 < early_s <= FIGURES_EVERY_S and not plan.urgent:  # longer: the clock was set back
                return early_s
            if not await self._write_status(target, body, dict(plan.status)):
                return None
            failpoint("operator.reconcile.after_status")
        for event in event_bodies(body, plan.events, self._around.instance, self._around.now()):
            await self._emit(event)
            failpoint("operator.reconcile.after_event")
        return None

    async def _write_status(self, target: Target, body: Body, status: dict[str, Any]) -> bool:
        """Write the status; return False if the object no longer exists.

        The patch carries the cached resource version, because our own actions have changed it since `body` was
        observed.
        """
        now_known = self._around.cache.get(target)
        if now_known is None or now_known["metadata"]["uid"] != body["metadata"]["uid"]:
            return False
        patch = {"metadata": {"resourceVersion": now_known["metadata"]["resourceVersion"]}, "status": status}
        try:
            after = await self._around.cluster.patch(target, patch, status=True)
        except NotFound:
            self._around.cache.lose(target, body["metadata"]["uid"])
            return False
        self._status_at[target] = self._around.now()
        self._around.cache.see(after, own=True)
        return True

    async def _emit(self, event: Body) -> None:
        """Create an event; only log an error, because nothing depends on events."""
        try:
            await self._around.cluster.create(event)
        except Conflict:
            return
        except MarlaasError as error:
            log.debug("an event was lost: %s", error)

    async def _look_at(self, target: Target, body: Body) -> None:
        """Read the object again after a conflict: the cached body is out of date."""
        try:
            self._around.cache.see(await self._around.cluster.get(target))
        except NotFound:
            self._around.cache.lose(target, body["metadata"]["uid"])

    def _forget(self, target: Target) -> None:
        self._status_at.pop(target, None)
        self._backoff.over(target)


def _named(action: Action) -> str:
    """Return the action's class name and kind, for failpoints."""
    match action:
        case Apply(manifest):
            return f"Apply_{manifest['kind']}"
        case Delete(kind):
            return f"Delete_{kind}"
        case _:
            return type(action).__name__

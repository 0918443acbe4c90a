"""Synthetic jobs for tests of admission: a demand of any size, and rounds of admissions over pools of one resource."""

from collections.abc import Iterable, Mapping

from tests.harness import job_document

from marlaas_api.messages import JobDocument
from marlaas_worker.orchestrator.capacity import SLOTS, JobDemand, Space
from marlaas_worker.orchestrator.fair_order import FairOrder
from marlaas_worker.orchestrator.shares import Holdings, PastUse

SPEC = job_document("sums").spec


def demand(
    name: str,
    tenant: str,
    units: int = 1,
    *,
    created_at: float = 0.0,
    priority: int = 0,
    pool: str = "tiny",
    also: str = "",
) -> JobDemand:
    """A job that needs this many adapter slots of a pool, and as many of the pool `also`."""
    spec = SPEC.model_copy(update={"priority": priority})
    place = {"namespace": f"{tenant}-1", "job": name, "uid": f"{tenant}-{name}", "tenant": tenant, "pool": pool}
    document = JobDocument(**place, created_at=created_at, spec=spec)
    return JobDemand(document, {(name, SLOTS): units for name in (pool, also) if name})


def order_of(
    totals: Mapping[str, int],
    holding: Iterable[JobDemand] = (),
    weights: Mapping[str, float] | None = None,
    past: PastUse | None = None,
    over_quota: Iterable[JobDemand] = (),
) -> tuple[FairOrder, list[JobDemand]]:
    """A round of admissions, and the list to which it adds the admitted jobs. totals: slots by pool."""
    amounts = {(pool, SLOTS): units for pool, units in totals.items()}
    held, known, refused = list(holding), weights or {}, list(over_quota)
    admitted: list[JobDemand] = []
    weight, is_refused = lambda tenant: known.get(tenant, 1.0), lambda one: one in refused
    holdings = Holdings(amounts, known, held)
    order = FairOrder(Space(amounts, held), holdings, past or PastUse(), weight, is_refused, admitted.append)
    return order, admitted


def names(demands: Iterable[JobDemand]) -> list[str]:
    return [one.document.job for one in demands]

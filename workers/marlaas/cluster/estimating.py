"""Rates of the jobs that have succeeded on a cluster's pools, from the statuses that the operator writes, and estimates from them.

A status has the job's totals only: the engine's time is divided among training and evaluations by their tokens. Jobs with
demonstrations are left out, whose time has another rate.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from marlaas.cluster.errors import AccessDenied, ObjectMissing
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.views import MODELPOOLS, RLJOBS, seconds
from marlaas.local.estimates import Estimate, Rates, estimate, like, per_episode, planned, work_by_part
from marlaas_api.documents import job_document, pool_spec
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import JobDocument, UsageAmounts
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_api.usage_objects import usage_amounts


def estimates(kubectl: Kubectl, jobs: Sequence[JobDocument], pools: Mapping[str, PoolSpec]) -> list[Estimate]:
    """Return the estimates of the jobs whose first policy's pool is known.

    Args:
        pools: by name, those that are not read from the cluster.

    Raises the errors of `marlaas.cluster.errors`.
    """
    found = dict(pools)
    for name in {_pool_of(job) for job in jobs} - pools.keys():
        with contextlib.suppress(ObjectMissing, AccessDenied, InvalidObject):
            found[name] = pool_spec(parse(ModelPool, _given(kubectl.get(MODELPOOLS, name))).spec)
    known = list(_rates(_bodies(kubectl), found))
    placed = [(job, _pool_of(job)) for job in jobs]
    return [estimate(job, found[name], known, _machine(name)) for job, name in placed if name in found]


def _bodies(kubectl: Kubectl) -> list[dict[str, Any]]:
    """Return the jobs of all namespaces; if the user may not list those, of the context's."""
    try:
        return kubectl.list(RLJOBS, "--all-namespaces")
    except AccessDenied:
        return kubectl.list(RLJOBS)


def _rates(bodies: Iterable[dict[str, Any]], pools: Mapping[str, PoolSpec]) -> Iterator[Rates]:
    for body in bodies:
        status = RLJobStatus.model_validate(body.get("status") or {})
        if status.phase != "Succeeded" or status.usage is None or status.finished_at is None:
            continue
        with contextlib.suppress(InvalidObject):  # of another release
            job = job_document(parse(RLJob, _given(body)), (), body["metadata"]["uid"], None)
            if (name := _pool_of(job)) in pools and not job.spec.demonstrated_steps:
                usage = usage_amounts(status.usage)
                yield _measured(job, pools[name], usage, seconds(status.finished_at) or 0.0)


def _measured(job: JobDocument, pool: PoolSpec, used: UsageAmounts, at: float) -> Rates:
    share = used.evaluation_tokens / used.generated_tokens if used.generated_tokens else 0.0
    evaluated = UsageAmounts(generated_tokens=used.evaluation_tokens, engine_s=share * used.engine_s)
    trained = UsageAmounts(
        generated_tokens=used.generated_tokens - used.evaluation_tokens,
        engine_s=(1 - share) * used.engine_s,
        trainer_s=used.trainer_s,
    )
    work = per_episode(work_by_part(trained, evaluated, used.admitted_s), planned(job.spec))
    return Rates(like=like(job, pool, _machine(_pool_of(job))), at=at, **work)


def _given(body: dict[str, Any]) -> dict[str, Any]:
    """Return an object as a person writes it."""
    metadata = {key: value for key, value in body["metadata"].items() if key in ("name", "namespace")}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, "spec": body["spec"]}


def _pool_of(job: JobDocument) -> str:
    return job.pool_of(job.spec.policies[0])


def _machine(pool: str) -> str:
    return f"pool {pool}"

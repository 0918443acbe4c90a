"""Reads what jobs and tenants of a cluster used, from the statuses that the operator writes."""

from collections.abc import Iterable
from typing import Any

from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.views import RLJOBS, ClusterJobView, job_view
from marlaas.episodes.usage import UsageRow
from marlaas_api.kinds.status import TenantStatus
from marlaas_api.messages import UsageAmounts
from marlaas_api.usage_objects import usage_amounts

TENANTS = "tenants.marlaas.dev"


def job_rows(kubectl: Kubectl, *, everywhere: bool) -> list[UsageRow]:
    """Return the usage of the jobs of the namespace, or of all namespaces. Raises the errors of `marlaas.cluster.errors`."""
    bodies = kubectl.list(RLJOBS, *(["--all-namespaces"] if everywhere else []))
    return [_row(job_view(body)) for body in bodies]


def deleted_rows(kubectl: Kubectl) -> list[UsageRow]:
    """Return for each Tenant that deleted jobs what they used. Raises the errors of `marlaas.cluster.errors`."""
    return list(_deleted(kubectl.list(TENANTS)))


def _row(job: ClusterJobView) -> UsageRow:
    status = job.status
    agents = status.agents if status is not None else ()
    return UsageRow(
        job.tenant,
        job.namespace,
        job.name,
        usage_amounts(status.usage if status is not None else None),
        {agent.name: usage_amounts(agent.usage) for agent in agents},
    )


def _deleted(bodies: Iterable[dict[str, Any]]) -> Iterable[UsageRow]:
    for body in bodies:
        amounts = usage_amounts(TenantStatus.model_validate(body.get("status") or {}).deleted_usage)
        if amounts != UsageAmounts():
            yield UsageRow(body["metadata"]["name"], "", "", amounts)

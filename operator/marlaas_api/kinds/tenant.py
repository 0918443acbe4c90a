"""Tenant: an accounting label over namespaces (docs/explanation/architecture.md); never part of an identity."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds.base import Distinct, DnsLabel, Kind, Quantity, Spec
from marlaas_api.kinds.status import TenantStatus
from marlaas_api.numeric import LARGEST_INTEGER

DEFAULT_QUEUED_JOBS = 100
"""Jobs in the queue of a tenant, and of a namespace without a Tenant."""


class QuotaSpec(Spec):
    """Limits on the tenant's usage. A job over quota is queued, or pauses; it never fails because of a quota."""

    jobs: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum admitted jobs; more are queued, and 0 admits none. Absent: no limit.",
    )
    adapter_slots: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum number of agents of admitted jobs; further jobs are queued. Absent: no limit.",
    )
    queued_jobs: int = Field(
        DEFAULT_QUEUED_JOBS,
        ge=1,
        le=10_000,
        description="Maximum jobs in the queue: handed over, and neither admitted nor ended. The others wait outside, the oldest first, and cost the "
        "orchestrator nothing. The default is more than any pool admits soon.",
    )
    tokens_per_second: float | None = Field(
        None,
        gt=0,
        le=LARGEST_INTEGER,
        description="Maximum generated tokens per second of all jobs together, averaged over a minute; above it, the jobs begin no new tasks. "
        "Absent: no limit.",
    )
    trainer_seconds_per_hour: float | None = Field(
        None,
        gt=0,
        le=LARGEST_INTEGER,
        description="Maximum seconds of trainers' computing per hour for all jobs together, averaged over ten minutes; above it, the jobs begin no new tasks. "
        "Absent: no limit.",
    )
    storage: Quantity | None = Field(
        None,
        description="Maximum bytes of adapters and checkpoints of all jobs together; above it, no further job is admitted. Absent: no limit.",
    )


class TenantSpec(Spec):
    """Namespaces of a tenant, its weight and its quota."""

    namespaces: Distinct[DnsLabel] = Field(
        min_length=1,
        max_length=1024,
        description="Namespaces that belong to the tenant. A namespace belongs to at most one tenant.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Weight of the tenant's share of its pools while tenants compete, relative to other tenants: for the admission of jobs and for places in "
        "the engines. All namespaces without a Tenant have weight 1 together.",
    )
    quota: QuotaSpec = Field(
        default_factory=lambda: QuotaSpec(),
        description="Limits on the tenant's usage.",
    )


class Tenant(Kind):
    """An accounting label over namespaces: weight and quota."""

    kind: Literal["Tenant"]
    spec: TenantSpec
    status: TenantStatus | None = Field(None, description="Observed state; written by the operator.")

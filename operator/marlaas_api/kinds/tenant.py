"""Tenant: an accounting label over namespaces (docs/architecture.md); never part of an identity."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds.base import Distinct, DnsLabel, Kind, Quantity, Spec
from marlaas_api.kinds.status import TenantStatus
from marlaas_api.numeric import LARGEST_INTEGER


class QuotaSpec(Spec):
    """Limits of a tenant's usage. Jobs over quota will be queued, never failed."""

    jobs: int | None = Field(None, ge=0, le=1_000_000, description="Admitted jobs. Absent: no bound; 0 admits nothing.")
    adapter_slots: int | None = Field(
        None, ge=0, le=1_000_000, description="Adapter slots that admitted jobs may hold together. Absent: no bound."
    )
    tokens_per_second: float | None = Field(
        None, gt=0, le=LARGEST_INTEGER, description="Generated tokens per second, averaged. Absent: no bound."
    )
    storage: Quantity | None = Field(None, description="Bytes of adapters and checkpoints. Absent: no bound.")


class TenantSpec(Spec):
    """Namespaces of a tenant, its weight and its quota."""

    namespaces: Distinct[DnsLabel] = Field(
        min_length=1,
        max_length=1024,
        description="Namespaces that belong to the tenant; a namespace belongs to at most one.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Share of contended throughput, relative to other tenants; 1, as a namespace without a Tenant has. Accepted and shown; this version "
        "serves all jobs alike.",
    )
    quota: QuotaSpec = Field(
        default_factory=lambda: QuotaSpec(),
        description="Bounds on what a tenant holds at once. Accepted and shown; this version enforces none of them.",
    )


class Tenant(Kind):
    """An accounting label over namespaces: weight and quota."""

    kind: Literal["Tenant"]
    spec: TenantSpec
    status: TenantStatus | None = Field(None, description="Written by the operator.")

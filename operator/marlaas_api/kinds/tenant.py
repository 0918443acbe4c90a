"""Tenant: an accounting label over namespaces (docs/architecture.md); never part of an identity."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds.base import Distinct, DnsLabel, Kind, Quantity, Spec
from marlaas_api.kinds.status import TenantStatus
from marlaas_api.numeric import LARGEST_INTEGER


class QuotaSpec(Spec):
    """Limits on the tenant's usage. Stored and shown only: this version does not enforce them.

    A later version will queue jobs over quota, not fail them.
    """

    jobs: int | None = Field(
        None, ge=0, le=1_000_000, description="Maximum admitted jobs; 0 admits none. Absent: no limit."
    )
    adapter_slots: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum adapter slots that admitted jobs hold in total. Absent: no limit.",
    )
    tokens_per_second: float | None = Field(
        None, gt=0, le=LARGEST_INTEGER, description="Maximum generated tokens per second, averaged. Absent: no limit."
    )
    storage: Quantity | None = Field(None, description="Maximum bytes of adapters and checkpoints. Absent: no limit.")


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
        description="Weight of the tenant's share of its pools' engines while tenants compete, relative to other tenants; a namespace without a Tenant has "
        "weight 1. Admission and trainers do not use it yet.",
    )
    quota: QuotaSpec = Field(
        default_factory=lambda: QuotaSpec(),
        description="Limits on the tenant's usage. Stored and shown only: this version does not enforce them.",
    )


class Tenant(Kind):
    """An accounting label over namespaces: weight and quota."""

    kind: Literal["Tenant"]
    spec: TenantSpec
    status: TenantStatus | None = Field(None, description="Observed state; written by the operator.")

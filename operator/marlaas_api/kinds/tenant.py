"""Tenant: an accounting label over namespaces (DESIGN, "Kinds"); never part of an identity."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds.base import DnsLabel, Kind, Quantity, Spec


class QuotaSpec(Spec):
    """Bounds on what a tenant holds at once; over quota is queued, never failed. None is no bound."""

    jobs: int | None = Field(None, ge=0, description="Admitted jobs.")
    adapter_slots: int | None = Field(None, ge=0, description="Adapter slots of admitted jobs.")
    tokens_per_second: float | None = Field(None, gt=0, description="Generated tokens per second, averaged.")
    storage: Quantity | None = Field(None, description="Bytes of adapters and checkpoints.")


class TenantSpec(Spec):
    """Who it is and what it may have."""

    namespaces: tuple[DnsLabel, ...] = Field(min_length=1, description="Namespaces that belong to the tenant.")
    weight: float = Field(1.0, gt=0, le=1000, description="Share of contended throughput, relative to other tenants.")
    quota: QuotaSpec = Field(default_factory=lambda: QuotaSpec())


class Tenant(Kind):
    """An accounting label over namespaces: weight and quota."""

    kind: Literal["Tenant"]
    spec: TenantSpec

"""Which Tenant a namespace belongs to, and the weights with which tenants compete. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from marlaas_api.kinds import Tenant
from marlaas_api.kinds.tenant import DEFAULT_QUEUED_JOBS
from marlaas_api.names import DEFAULT_TENANT
from marlaas_operator.snapshot import Meta, by_precedence


@dataclass(frozen=True, slots=True)
class ListedTenant:
    """A Tenant and the namespaces in its spec. tenant: None if it does not parse."""

    meta: Meta
    namespaces: tuple[str, ...]
    tenant: Tenant | None


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a tenant. name: in messages. limit: jobs that it holds. namespaces: whose jobs it holds."""

    name: str
    limit: int
    namespaces: tuple[str, ...]


class Tenancy:
    """All Tenants, by namespace. Of several Tenants with one namespace, the oldest has it."""

    def __init__(self, listed: Iterable[ListedTenant] = ()) -> None:
        self._owners: dict[str, Tenant] = {}
        self._own: dict[str, list[str]] = defaultdict(list)
        self._first: dict[str, ListedTenant] = {}
        for one in by_precedence((each.meta, each) for each in listed):
            for namespace in one.namespaces:
                self._first.setdefault(namespace, one)
                if one.tenant is not None and namespace not in self._owners:
                    self._owners[namespace] = one.tenant
                    self._own[one.meta.name].append(namespace)

    def owner(self, namespace: str) -> Tenant | None:
        """Return the Tenant that has a namespace; None: the namespace belongs to the default tenant."""
        return self._owners.get(namespace)

    def namespaces(self, tenant: str) -> tuple[str, ...]:
        """Return the namespaces that a Tenant has."""
        return tuple(self._own.get(tenant, ()))

    def queue(self, namespace: str) -> Queue:
        """Return the queue of a namespace's jobs. A namespace without a Tenant has one of its own, so that it fills no other's."""
        owner = self._owners.get(namespace)
        if owner is None:
            return Queue(f"namespace '{namespace}'", DEFAULT_QUEUED_JOBS, (namespace,))
        name = owner.metadata.name
        return Queue(f"Tenant '{name}'", owner.spec.quota.queued_jobs, self.namespaces(name))

    def unread(self, namespace: str) -> str:
        """Return the name of a namespace's Tenant if it does not parse, so that its weight and quota are unknown; else empty."""
        first = self._first.get(namespace)
        return first.meta.name if first is not None and first.tenant is None else ""

    def weights(self, namespaces: Iterable[str]) -> dict[str, float]:
        """Return the weights of the tenants that have these namespaces; the default tenant has weight 1."""
        owners = map(self._owners.get, namespaces)
        return dict(
            (one.metadata.name, one.spec.weight) if one is not None else (DEFAULT_TENANT, 1.0) for one in owners
        )

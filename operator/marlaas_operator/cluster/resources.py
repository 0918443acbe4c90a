"""The kinds that the operator deals with, and where the API server keeps them."""

from dataclasses import dataclass
from typing import Any

from marlaas_api.kinds.base import API_VERSION

Body = dict[str, Any]
"""A raw object, as the API server sends it or as a manifest builder makes it."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind. api_version: `apps/v1`, or `v1` for the core group."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version within the group."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str = "", name: str = "") -> str:
        """URL path of an object, or of all objects when the name is empty; of every namespace when that is empty too."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


@dataclass(frozen=True, slots=True)
class Target:
    """One object: what to get, patch or delete. namespace is empty for kinds without one."""

    resource: Resource
    namespace: str
    name: str

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.resource.kind} {place}"

    @property
    def path(self) -> str:
        """URL path."""
        return self.resource.path(self.namespace, self.name)


RLJOBS = Resource(API_VERSION, "RLJob", "rljobs")
MODELPOOLS = Resource(API_VERSION, "ModelPool", "modelpools", namespaced=False)
TENANTS = Resource(API_VERSION, "Tenant", "tenants", namespaced=False)
DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
STATEFULSETS = Resource("apps/v1", "StatefulSet", "statefulsets")
SERVICES = Resource("v1", "Service", "services")
DISRUPTION_BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
SERVICE_ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts")
PODS = Resource("v1", "Pod", "pods")
SECRETS = Resource("v1", "Secret", "secrets")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")
NAMESPACES = Resource("v1", "Namespace", "namespaces", namespaced=False)
CRDS = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)

KINDS = (RLJOBS, MODELPOOLS, TENANTS)
"""Ours: what people write."""
OWNED = (
    DEPLOYMENTS,
    STATEFULSETS,
    SERVICES,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    CONFIG_MAPS,
    SERVICE_ACCOUNTS,
    PODS,
)
"""What the operator makes and watches; Secrets it makes blindly, and Pods it only watches."""
_BY_KIND = {
    (resource.api_version, resource.kind): resource for resource in (*KINDS, *OWNED, SECRETS, EVENTS, NAMESPACES, CRDS)
}


def resource_of(body: Body) -> Resource:
    """The resource of an object by its apiVersion and kind. Raises KeyError for a kind that the operator does not know."""
    return _BY_KIND[str(body["apiVersion"]), str(body["kind"])]


def target_of(body: Body) -> Target:
    """Which object a body is."""
    resource, metadata = resource_of(body), body["metadata"]
    return Target(resource, str(metadata.get("namespace", "")) if resource.namespaced else "", str(metadata["name"]))

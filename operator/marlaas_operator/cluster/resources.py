"""Kinds that the operator uses, and their URL paths."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marlaas_api.kinds.base import API_VERSION
from marlaas_api.messages.packed import PackedArgs

Body = dict[str, Any]
"""A raw object, from the API server or from a manifest builder."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of Kubernetes objects, as its API names it. api_version: `apps/v1`, or `v1` for the core group."""

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
        """Return the URL path of an object.

        Without a name: of all objects in the namespace; without both: of all objects of the kind.
        """
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


@dataclass(frozen=True, slots=True)
class Target:
    """Address of one object. namespace is empty for cluster-scoped kinds."""

    resource: Resource
    namespace: str
    name: str

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.resource.kind} {place}"

    @property
    def path(self) -> str:
        """URL path of the object."""
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

MANAGED = "app.kubernetes.io/managed-by=marlaas-operator"
"""Label selector of the objects that the operator creates."""
KINDS = (RLJOBS, MODELPOOLS, TENANTS)
"""Our custom resources, which people write."""
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
"""Kinds that the operator creates and watches; of Pods it only watches. Secrets are missing: it creates them and
never reads them.
"""
_OURS = frozenset((one.api_version, one.kind) for one in KINDS)
_BY_KIND = {
    (resource.api_version, resource.kind): resource for resource in (*KINDS, *OWNED, SECRETS, EVENTS, NAMESPACES, CRDS)
}


_KEPT = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "finalizers",
    "ownerReferences",
)


def slim(body: Body) -> Body:
    """Return what is kept of an object: no managedFields; of our kinds neither annotations nor labels, which only people read.

    The arguments of a job's environment are compressed: they may be most of the object, and are needed once. They and its entrypoint
    are shared with the job's document.
    """
    metadata = body["metadata"]
    ours = (body.get("apiVersion"), body.get("kind")) in _OURS
    kept = (*_KEPT, *(() if ours else ("labels", "annotations")))
    return {**body, "metadata": {key: metadata[key] for key in kept if key in metadata}, **_packed(body)}


def unpacked(body: Body) -> Body:
    """Return an object as it was before `slim` compressed the arguments."""
    args = _mapping(_mapping(body.get("spec")).get("environment")).get("args")
    return _with(body, {"args": args.value}) if isinstance(args, PackedArgs) else body


def _packed(body: Body) -> Body:
    environment = _mapping(_mapping(body.get("spec")).get("environment"))
    args, entrypoint = environment.get("args"), environment.get("entrypoint")
    found: Body = {}
    if body.get("kind") != RLJOBS.kind:
        return {}
    if isinstance(args, dict) and args:
        found["args"] = PackedArgs(args)
    if isinstance(entrypoint, list):
        found["entrypoint"] = [sys.intern(word) if type(word) is str else word for word in entrypoint]
    return {"spec": _with(body, found)["spec"]} if found else {}


def _with(body: Body, fields: Body) -> Body:
    """Return a job with other fields of its environment."""
    spec = body["spec"]
    return {**body, "spec": {**spec, "environment": {**spec["environment"], **fields}}}


def resource_of(body: Body) -> Resource:
    """Return the resource of an object by its apiVersion and kind. Raises KeyError for an unknown kind."""
    return _BY_KIND[str(body["apiVersion"]), str(body["kind"])]


def target_of(body: Body) -> Target:
    """Return the target of a body."""
    resource, metadata = resource_of(body), body["metadata"]
    return Target(resource, str(metadata.get("namespace", "")) if resource.namespaced else "", str(metadata["name"]))


def version_of(body: Body) -> int:
    """Return the resource version; those of one kind increase monotonically (guaranteed since Kubernetes 1.35)."""
    return int(body["metadata"]["resourceVersion"])


def stored_phase(job: Body) -> str | None:
    """Return the phase in a job's status; None before the first status."""
    return (job.get("status") or {}).get("phase")


def stored_reason(job: Body) -> str | None:
    """Return the reason in a job's status; None before the first status."""
    return (job.get("status") or {}).get("reason")


def pools_of(job: Body) -> tuple[str, ...]:
    """Return the names of the pools that a job names: its own, then those of its agents.

    A stored job may predate the rules of its kind.
    """
    spec = _mapping(job.get("spec"))
    agents = spec.get("agents")
    parts = (spec, *(map(_mapping, agents) if isinstance(agents, list) else ()))
    names = (_mapping(part.get("poolRef")).get("name") for part in parts)
    return tuple(dict.fromkeys(str(name) for name in names if name))


def namespaces_of(tenant: Body) -> tuple[str, ...]:
    """Return the namespaces in a Tenant's spec, even if the Tenant does not parse."""
    listed = _mapping(tenant.get("spec")).get("namespaces")
    return tuple(map(str, listed)) if isinstance(listed, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

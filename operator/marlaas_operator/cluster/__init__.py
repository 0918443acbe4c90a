"""The seam to Kubernetes: everything that the operator may ask of an API server.

`cluster.api_server.connect` is the real one, `cluster.memory.MemoryCluster` ships as its fake; both pass
`tests/operator/cluster/test_contract.py`. Bodies are raw objects; nothing here knows what they mean.
"""

from typing import Protocol

from marlaas_operator.cluster.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NoAnswer,
    NotFound,
    Terminating,
    TooMany,
    Unavailable,
)
from marlaas_operator.cluster.resources import Body, Resource, Target, resource_of, target_of

__all__ = [
    "FIELD_MANAGER",
    "AlreadyExists",
    "Body",
    "Cluster",
    "Conflict",
    "Forbidden",
    "Gone",
    "Invalid",
    "NoAnswer",
    "NotFound",
    "Resource",
    "Target",
    "Terminating",
    "TooMany",
    "Unavailable",
    "resource_of",
    "target_of",
]

FIELD_MANAGER = "marlaas-operator"


class Cluster(Protocol):
    """An API server. Every method may raise Unavailable, TooMany, Forbidden; the others as said."""

    async def get(self, target: Target) -> Body:
        """Raises NotFound."""
        ...

    async def list(self, resource: Resource, *, namespace: str = "", labels: str = "") -> list[Body]:
        """All objects of a kind, of one namespace or of all, that match a label selector. Raises NotFound: no such kind."""
        ...

    async def create(self, body: Body) -> Body:
        """Raises AlreadyExists, Invalid, NotFound (the namespace), Terminating."""
        ...

    async def apply(self, body: Body) -> Body:
        """Server-side apply: make the object, or make these fields of it ours, taking them from whoever had them.

        Fields that an earlier apply set and this one lacks go; fields of others stay. The same body again changes nothing.
        Raises Invalid, NotFound (the namespace), Terminating, Conflict (metadata.uid or resourceVersion is given and differs).
        """
        ...

    async def patch(self, target: Target, patch: Body, *, status: bool = False) -> Body:
        """JSON merge patch of the object, or of its status alone.

        metadata.resourceVersion in the patch is a condition; so is metadata.uid, but not for a status. Raises NotFound, Invalid, Conflict.
        """
        ...

    async def delete(self, target: Target, *, uid: str | None = None) -> bool:
        """Ask for deletion in the background; True if the object is not there any more (or was not), False while something holds it.

        Raises Conflict: there, with another uid.
        """
        ...

    async def close(self) -> None: ...

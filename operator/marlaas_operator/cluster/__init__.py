"""Interface to Kubernetes: all requests that the operator may make to an API server.

`cluster.api_server.connect` returns the real one; `cluster.memory.MemoryCluster` is its fake. Both pass
`tests/operator/cluster/test_contract.py`. Bodies are raw objects.
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
    """An API server.

    Every method may raise Unavailable, TooMany and Forbidden, besides the errors in its own docstring.
    """

    async def get(self, target: Target) -> Body:
        """Return an object. Raises NotFound."""
        ...

    async def list(self, resource: Resource, *, namespace: str = "", labels: str = "") -> list[Body]:
        """Return all objects of a kind, of one namespace or of all, that match a label selector.

        Raises:
            NotFound: the API server does not serve the kind.
        """
        ...

    async def create(self, body: Body) -> Body:
        """Create an object. Raises AlreadyExists, Invalid, NotFound (the namespace), Terminating."""
        ...

    async def apply(self, body: Body) -> Body:
        """Server-side apply: create the object, or take ownership of these fields, by force.

        Fields of an earlier apply that are missing now are removed; fields of other managers stay. The same
        body again changes nothing. Raises Invalid, NotFound (the namespace), Terminating, Conflict
        (metadata.uid or resourceVersion is given and differs).
        """
        ...

    async def patch(self, target: Target, patch: Body, *, status: bool = False) -> Body:
        """Apply a JSON merge patch to the object, or to its status alone.

        metadata.resourceVersion in the patch is a precondition; so is metadata.uid, except for a status. Raises
        NotFound, Invalid, Conflict.
        """
        ...

    async def delete(self, target: Target, *, uid: str | None = None) -> bool:
        """Request deletion in the background.

        Returns:
            True if the object no longer exists, False while a finalizer or a grace period holds it.

        Raises:
            Conflict: the object has another uid.
        """
        ...

    async def close(self) -> None: ...

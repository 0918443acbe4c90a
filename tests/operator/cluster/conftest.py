"""One cluster for each kind of gateway: the fake, and a real API server."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from tests.operator.objects import namespace

from marlaas_operator.cluster import Cluster, Target
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import CONFIG_MAPS, DEPLOYMENTS, NAMESPACES, RLJOBS

if TYPE_CHECKING:
    from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture(params=["memory", pytest.param("api_server", marks=pytest.mark.api_server)])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """An API server with the namespace team-a and nothing in it."""
    if request.param == "memory":
        yield MemoryCluster("team-a")
        return
    from marlaas_operator.cluster.api_server import connect

    plane: ControlPlane = request.getfixturevalue("control_plane")
    gateway = await connect(plane.kubeconfig)
    try:
        await gateway.apply(namespace("team-a"))
        yield gateway
        await _sweep(gateway)
    finally:
        await gateway.close()


async def _sweep(gateway: Cluster) -> None:
    for resource in (CONFIG_MAPS, DEPLOYMENTS, RLJOBS):
        for item in await gateway.list(resource, namespace="team-a"):
            await gateway.delete(Target(resource, "team-a", item["metadata"]["name"]))
    await gateway.get(Target(NAMESPACES, "", "team-a"))

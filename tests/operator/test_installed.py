"""What `helm test` asks, and what it says when a part does not do its work."""

import pytest
from tests.operator.objects import installation

from marlaas_operator.cluster import target_of
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.installed import NotWorking, available


async def deployed(cluster: MemoryCluster, **condition: str) -> None:
    metadata = {"name": "marlaas-operator", "namespace": "marlaas-system"}
    made = await cluster.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata})
    if condition:
        conditions = [{"type": "Available", **condition}]
        await cluster.patch(target_of(made), {"status": {"conditions": conditions}}, status=True)


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [
        ({"status": "True"}, "marlaas-operator is available"),
        ({"status": "False", "message": "no minimum availability"}, "not available: no minimum availability"),
        ({}, "not available: its status has no such condition yet"),
    ],
)
async def test_a_deployment_is_available_or_says_why_it_is_not(condition: dict[str, str], sentence: str) -> None:
    cluster = MemoryCluster("marlaas-system")
    await deployed(cluster, **condition)
    try:
        said = await available(cluster, installation(), "operator")
    except NotWorking as error:
        said = str(error)
        assert condition.get("status") != "True"
    assert sentence in said

"""What `helm test` asks, and what it says when a part does not do its work."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.operator.objects import installation

from marlaas_api.bus import BusRefused
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, OperatorUser, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats
from marlaas_operator.cluster import target_of
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.installation import Installation
from marlaas_operator.installed import NotWorking, available, bus_answers, kinds_served


async def deployed(cluster: MemoryCluster, **condition: str) -> None:
    metadata = {"name": "marlaas-operator", "namespace": "marlaas-system"}
    made = await cluster.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata})
    if condition:
        conditions = [{"type": "Available", **condition}]
        await cluster.patch(target_of(made), {"status": {"conditions": conditions}}, status=True)


async def test_the_kinds_are_counted() -> None:
    assert (
        await kinds_served(MemoryCluster())
        == "the API server serves the kinds ModelPool (0 objects) and Tenant (0 objects)"
    )


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


@pytest.fixture
async def bus_with_users(tmp_path: Path) -> AsyncIterator[tuple[Installation, Path]]:
    """A server that wants credentials, and a file with the operator's; an orchestrator has been there."""
    keys, creds = BusKeys.make(), tmp_path / "operator.creds"
    creds.write_text(mint(keys, OperatorUser(), time.time()))
    orchestrator = tmp_path / "orchestrator.creds"
    orchestrator.write_text(mint(keys, OrchestratorUser(), time.time()))
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        bus = await connect(server.url, name="orchestrator", creds=orchestrator)
        await bus.ensure()
        await bus.close()
        yield installation(natsUrl=server.url), creds


async def test_the_bus_answers_who_has_a_credential_of_its_installation(
    bus_with_users: tuple[Installation, Path], tmp_path: Path
) -> None:
    told, creds = bus_with_users
    assert (await bus_answers(told, creds)).endswith("answers and knows 0 jobs")
    foreign = tmp_path / "foreign.creds"
    foreign.write_text(mint(BusKeys.make(), OperatorUser(), time.time()))
    with pytest.raises(BusRefused):
        await bus_answers(told, foreign)

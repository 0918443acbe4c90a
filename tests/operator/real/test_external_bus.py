"""A bus that is somebody else's: an address, and a Secret with its keys, under the rights and admission policies of the chart for such a bus."""

import asyncio
import base64
import json

import pytest
import yaml
from tests.operator.objects import SYSTEM, body
from tests.operator.real.rights import GROUPS, USER, chart, granted, in_force, install

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import NETWORK_POLICIES, SECRETS

CREDENTIALS = Target(SECRETS, SYSTEM, "bus-credentials")
LABEL = {"app.kubernetes.io/managed-by": "marlaas-operator"}


@pytest.fixture
async def external(harness, helm):
    """The chart's objects, and an installation that finds the bus of the rig as if it were elsewhere; its Secret is not there yet."""
    install(harness, "external")
    (config,) = (one for one in chart("external") if one["kind"] == "ConfigMap")
    told = yaml.safe_load(config["data"]["installation.yaml"])
    assert told["natsPodSelector"] is None
    (harness.folder / "installation.yaml").write_text(yaml.safe_dump(told | {"natsUrl": harness.nats.url}))
    await harness.gateway.delete(CREDENTIALS)
    await harness.gateway.delete(Target(SECRETS, SYSTEM, harness.installation.bus_secret))
    await granted(harness, CREDENTIALS.name)
    return harness


def keys_secret(harness, **labels):
    data = {"keys.json": base64.b64encode(json.dumps(harness.keys.dump()).encode()).decode()}
    return body("v1", "Secret", SYSTEM, CREDENTIALS.name, labels=labels) | {"data": data}


async def test_it_names_what_is_missing_and_then_runs_jobs_over_a_bus_that_is_elsewhere(external, orchestrator):
    missing = "bus-credentials does not exist; create it with the keys of the external bus under the key keys.json"
    assert missing in await ended(external)

    await external.gateway.apply(keys_secret(external))
    await in_force(external, CREDENTIALS)
    assert "app.kubernetes.io/managed-by=marlaas-operator" in await ended(external)
    assert set((await external.gateway.get(CREDENTIALS))["data"]) == {"keys.json"}

    await external.gateway.apply(keys_secret(external, **LABEL))
    await external.run_job(orchestrator, kubeconfig=external.plane.user_kubeconfig(USER, GROUPS))
    await external.owns(4)
    data = (await external.gateway.get(CREDENTIALS))["data"]
    assert set(data) == {"keys.json", "operator.creds", "orchestrator.creds"}
    policy = await external.gateway.get(Target(NETWORK_POLICIES, "team-a", "one-sandbox"))
    _, to_bus = policy["spec"]["egress"]
    assert [peer["ipBlock"]["cidr"] for peer in to_bus["to"]] == ["10.20.0.0/24"]
    assert await external.get(Target(SECRETS, SYSTEM, "marlaas-bus")) is None
    assert "forbidden" not in external.started[-1].log.read_text()


async def ended(harness):
    """The last words of an operator that only a person can help."""
    harness.start_operator(kubeconfig=harness.plane.user_kubeconfig(USER, GROUPS))
    assert await asyncio.to_thread(harness.started[-1].wait, 60) == 2, harness.words()
    return harness.started[-1].last_words()

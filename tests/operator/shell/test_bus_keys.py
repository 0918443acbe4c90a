"""The bus's keys: made once, never overwritten; what is minted from them, and written while the operator runs."""

import asyncio
import base64
import json
from pathlib import Path

import pytest
from tests.operator.objects import SYSTEM, body, installation

from marlaas_api.bus_users import BusKeys
from marlaas_api.errors import InvalidInput, first_cause
from marlaas_operator import __main__ as process
from marlaas_operator.bus_keys import ensure_keys, renew_platform
from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import CONFIG_MAPS, SECRETS

SECRET = Target(SECRETS, SYSTEM, "marlaas-bus")
DAY_S = 86400.0
NOW = 1_800_000_000.0


def secret(texts: dict[str, str]) -> Body:
    data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    return body("v1", "Secret", SYSTEM, "marlaas-bus") | {"data": data}


async def test_keys_are_made_once_and_go_with_the_installation():
    cluster = MemoryCluster(SYSTEM)
    made = await cluster.create(body("v1", "ConfigMap", SYSTEM, "marlaas-installation"))
    keys = await ensure_keys(cluster, installation())
    assert await ensure_keys(cluster, installation()) == keys
    secret = await cluster.get(SECRET)
    assert [one["uid"] for one in secret["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]
    assert secret["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "marlaas-operator"
    server = base64.b64decode(secret["data"]["nats.conf"]).decode()
    assert "max_payload: 8388608" in server
    assert not any(seed in server for seed in keys.dump().values())
    assert await cluster.get(Target(CONFIG_MAPS, SYSTEM, "marlaas-installation"))


async def test_two_operators_that_begin_at_once_have_the_same_keys():
    cluster = MemoryCluster(SYSTEM)
    first, second = await asyncio.gather(*(ensure_keys(cluster, installation()) for _ in range(2)))
    assert first == second == await ensure_keys(cluster, installation())
    assert [verb for verb, _ in cluster.calls].count("create") == 2


async def test_an_external_bus_brings_its_own_keys_and_a_secret_without_keys_is_said_to_be_one():
    cluster = MemoryCluster(SYSTEM)
    external = installation(natsPodSelector=None)
    with pytest.raises(InvalidInput, match=r"marlaas-bus does not exist.*keys\.json"):
        await ensure_keys(cluster, external)
    keys = BusKeys.make()
    await cluster.create(secret({"keys.json": json.dumps(keys.dump())}))
    assert await ensure_keys(cluster, external) == keys
    for data, words in (({}, "has no key keys.json"), ({"keys.json": "{}"}, "missing operator, system")):
        cluster = MemoryCluster(SYSTEM)
        await cluster.create(secret(data))
        with pytest.raises(InvalidInput, match=words):
            await ensure_keys(cluster, installation())


async def test_the_platforms_credentials_are_written_once_a_window():
    cluster = MemoryCluster(SYSTEM)
    keys = await ensure_keys(cluster, installation())
    await renew_platform(cluster, installation(), keys, NOW)
    first = await cluster.get(SECRET)
    await renew_platform(cluster, installation(), keys, NOW + 60.0)
    assert await cluster.get(SECRET) == first
    await renew_platform(cluster, installation(), keys, NOW + DAY_S)
    later = await cluster.get(SECRET)
    assert later["data"]["orchestrator.creds"] != first["data"]["orchestrator.creds"]
    assert later["data"]["keys.json"] == first["data"]["keys.json"]


async def test_our_own_credential_that_cannot_be_written_any_more_ends_the_operator(tmp_path, monkeypatch):
    cluster = MemoryCluster(SYSTEM)
    keys = await ensure_keys(cluster, installation())
    written: list[str] = []

    def fill(creds: Path, text: str) -> None:
        if written:
            raise OSError("no space left on device")
        written.append(text)

    async def serve() -> None:
        async with asyncio.timeout(86400), process._renewing(cluster, installation(), keys, tmp_path / "bus.creds"):
            await asyncio.Event().wait()

    monkeypatch.setattr(process, "_write", fill)
    with pytest.raises(ExceptionGroup) as caught:
        await serve()
    assert str(first_cause(caught.value)) == "no space left on device"

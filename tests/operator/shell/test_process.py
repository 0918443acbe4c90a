"""The operator as a process: what goes on beside the service, and what ends it."""

import asyncio
from pathlib import Path

import pytest
from tests.operator.objects import SYSTEM, installation
from tests.operator.shell.test_bus_keys import SECRET

from marlaas_api.errors import first_cause
from marlaas_operator import __main__ as process
from marlaas_operator.bus_keys import ensure_keys
from marlaas_operator.cluster import Target, Unavailable
from marlaas_operator.cluster.memory import MemoryCluster
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic
pytestmark = pytest.mark.usefixtures("monotonic")


async def test_our_own_credential_that_cannot_be_written_any_more_ends_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_an_api_server_that_is_away_for_a_while_ends_no_renewal_and_the_service_ends_it(tmp_path: Path) -> None:
    cluster = MemoryCluster(SYSTEM)
    keys = await ensure_keys(cluster, installation())
    over = asyncio.Event()
    tries: list[Target] = []

    def away(verb: str, target: Target) -> Exception | None:
        tries.append(target)
        if len(tries) > 3:
            over.set()
        return Unavailable("away") if len(tries) < 3 else None

    cluster.fail = away
    async with asyncio.timeout(86400), process._renewing(cluster, installation(), keys, tmp_path / "bus.creds"):
        await over.wait()
    assert "orchestrator.creds" in cluster._objects[SECRET]["data"]

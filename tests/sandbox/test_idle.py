"""A sandbox that waits for tasks."""

import asyncio

import pytest
from tests.sandbox.conftest import SandboxHarness

from marlaas_worker.sandbox import service


async def test_a_sandbox_that_waits_for_tasks_stops_at_once(
    harness: SandboxHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FETCH_S", 3600.0)
    document = harness.document("reverse")
    async with asyncio.timeout(60.0), harness.open(document):
        await harness.put_task(harness.task(document))
        await harness.episodes(1)  # it has begun to wait for the next one


async def test_a_task_that_comes_during_a_long_wait_is_played(
    harness: SandboxHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FETCH_S", 3600.0)
    (episode,) = await harness.play("shares:share")
    assert episode.fault is None

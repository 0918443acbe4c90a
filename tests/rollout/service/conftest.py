"""Fixtures of the rollout role's tests: replicas on a memory bus in virtual time, and engines for them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import LIMITS, ScriptedEngine

from marlaas_worker.rollout import service
from tests import virtual_time

TOO_LONG_S = 7200.0
event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic


@pytest.fixture
async def harness(tmp_path: Path, monotonic: None) -> AsyncIterator[RolloutHarness]:
    made = RolloutHarness(tmp_path, clock=virtual_time.now)
    await made.bus.ensure()
    loop = asyncio.get_running_loop()
    loop.call_later(TOO_LONG_S, loop.stop)  # A role's timers would let a test wait for ever.
    yield made
    await made.close()


@pytest.fixture
def shut_engine() -> ScriptedEngine:
    """An engine that lets no generation end until it is opened."""
    return ScriptedEngine()


@pytest.fixture
def make_engine() -> Callable[..., ScriptedEngine]:
    """Make engines that are open."""

    def make(**settings: Any) -> ScriptedEngine:
        limits = replace(LIMITS, **settings.pop("limits", {}))
        engine = ScriptedEngine(limits=limits, **settings)
        engine.open.set()
        return engine

    return make


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rollout roles that the test starts."""
    roles: list[Any] = []

    class Recorded(service._Rollout):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            roles.append(self)

    monkeypatch.setattr(service, "_Rollout", Recorded)
    return roles

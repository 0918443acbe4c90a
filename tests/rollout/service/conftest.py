"""Fixtures of the rollout role's tests: replicas on a memory bus or on a real server, and engines for them."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.service.harness import NatsRolloutHarness, RolloutHarness
from tests.rollout.service.scripted import LIMITS, ScriptedEngine

from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.rollout import reload_pace, service


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[RolloutHarness]:
    made = RolloutHarness(tmp_path)
    await made.bus.ensure()
    yield made
    await made.close()


@pytest.fixture
async def nats_harness(tmp_path: Path) -> AsyncIterator[NatsRolloutHarness]:
    async with EmbeddedNats(tmp_path / "nats") as nats:
        made = NatsRolloutHarness(tmp_path, dial=lambda name: connect(nats.url, name=name))
        made.nats, made.bus = nats, await made.connect("test")
        await made.bus.ensure()
        yield made
        await made.close()
        await made.bus.close()


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


@pytest.fixture
def brief_quanta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a version lose its slot as soon as another one needs it."""
    for bound in ("MIN_QUANTUM_S", "MAX_QUANTUM_S"):
        monkeypatch.setattr(reload_pace, bound, 0.01)

"""Fixtures of the rollout role's tests: replicas on a memory bus in virtual time, and engines for them."""

import asyncio
from dataclasses import replace

import pytest
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import LIMITS, ScriptedEngine

from marlaas_worker.rollout import service
from tests import virtual_time

TOO_LONG_S = 7200.0
event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic


@pytest.fixture
async def harness(tmp_path, monotonic):
    made = RolloutHarness(tmp_path, clock=virtual_time.now)
    await made.bus.ensure()
    loop = asyncio.get_running_loop()
    loop.call_later(TOO_LONG_S, loop.stop)  # A role's timers would let a test wait for ever.
    yield made
    await made.close()


@pytest.fixture
def shut_engine():
    """An engine that lets no generation end until it is opened."""
    return ScriptedEngine()


@pytest.fixture
def make_engine():
    def make(limits=None, **settings):
        engine = ScriptedEngine(limits=replace(LIMITS, **(limits or {})), **settings)
        engine.open.set()
        return engine

    return make


@pytest.fixture
def roles(monkeypatch):
    roles, init = [], service._Rollout.__init__

    def recorded(self, *arguments):
        init(self, *arguments)
        roles.append(self)

    monkeypatch.setattr(service._Rollout, "__init__", recorded)
    return roles

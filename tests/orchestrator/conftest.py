"""A job document and the episodes of its groups, for tests of pure decisions, and the harness of the service."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.harness import an_episode
from tests.orchestrator.harness import OrchestratorHarness, a_job

from marlaas_api import failpoints
from marlaas_api.messages import Episode, FaultClass, JobDocument
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


@pytest.fixture
def document() -> Callable[..., JobDocument]:
    return a_job


@pytest.fixture
def play() -> Callable[..., list[Episode]]:
    """Both episodes of the training group with this index, in which all agents speak; a reward of None is an environment fault."""

    def one(document: JobDocument, index: int, member: int, reward: float | None) -> Episode:
        fault = {"fault": FaultClass.ENV, "fault_text": "KeyError: 'x'"}
        names = [agent.name for agent in document.spec.agents]
        ended = fault if reward is None else {"rewards": dict.fromkeys(names, reward)}
        leaves = {name: (position,) for position, name in enumerate(names)}
        return an_episode(document, index, member, leaves=leaves, **ended)

    return lambda document, index, rewards: [one(document, index, *member) for member in enumerate(rewards)]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[OrchestratorHarness]:
    made = OrchestratorHarness(tmp_path)
    await made.bus.ensure()
    yield made
    failpoints.hook = None

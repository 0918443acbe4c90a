"""Two agents of a job whose groups come in any order and in batches of any size: the same sums, and so the same adapters."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tests.harness import WITHIN_S
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api.messages import GroupReady, JobDocument
from marlaas_worker.trainer.intake import StepInbox

AGENTS = ("solver", "verifier")
STEPS, GROUPS = 2, 3
RATE = 3e-3
ROUNDING = RATE / 100
"""Adam moves a weight by RATE times a ratio near 1, so only the gradient's relative error counts. A float32 sum errs by about 1e-7 of its
terms; where these cancel to a hundred-thousandth, that is a hundredth of the sum. A lost or doubled group moves weights by about RATE."""
IN_ORDER, BACKWARDS = (0, 1, 2, None), (None, 2, 1, 0)
"""A step's positions, and None for its end, in the order in which they are logged."""


def team(**training: Any) -> JobDocument:
    made = job(groupsPerStep=GROUPS, optimizer={"learningRate": RATE}, **training)
    (agent,) = made.spec.agents
    agents = tuple(agent.model_copy(update={"name": name}) for name in AGENTS)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"agents": agents})})


async def log(
    harness: TrainerHarness,
    document: JobDocument,
    step: int,
    entries: Sequence[int | None],
    taken: asyncio.Queue[GroupReady] | None = None,
) -> None:
    """Log a step of both agents. taken: log nothing more before a group is taken."""
    for position in entries:
        for name in AGENTS:
            if position is None:
                await harness.close(document, step, GROUPS, step, agent=name)
            else:
                await harness.assign(document, step, [position], agent=name)
                if taken is not None:
                    assert (await taken.get()).agent == name


async def versions(harness: TrainerHarness, document: JobDocument, version: int) -> None:
    for name in AGENTS:
        await harness.version(document, version, name)


async def adapters(harness: TrainerHarness, document: JobDocument) -> dict[str, bytes]:
    return {name: await harness.adapter(document, name) for name in AGENTS}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[GroupReady]:
    """Groups whose gradients are summed."""
    found, take = asyncio.Queue[GroupReady](), StepInbox.take

    def observed(inbox: StepInbox, group: GroupReady) -> None:
        take(inbox, group)
        found.put_nowait(group)

    monkeypatch.setattr(StepInbox, "take", observed)
    return found


async def test_strict_agents_have_the_same_bits_however_their_groups_come(harness, taken):
    """Each step is sampled from the version before it; a group's place in the sum is its position."""
    found, document = [], team()
    for entries, one_by_one in ((IN_ORDER, taken), (BACKWARDS, None)):
        trainers = await harness.another()
        async with trainers.training(document), asyncio.timeout(WITHIN_S):
            for step in range(STEPS):
                await log(trainers, document, step, entries, one_by_one)
                await versions(trainers, document, step + 1)
        found.append(await adapters(trainers, document))
    async with harness.training(document):
        pass
    for step in range(STEPS):
        await log(harness, document, step, IN_ORDER)
        async with harness.trainer():  # it reads them all at once
            await versions(harness, document, step + 1)
    found.append(await adapters(harness, document))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 2


async def asynchronously(
    harness: TrainerHarness, order: Sequence[int], microbatch_tokens: int = 64
) -> dict[str, dict[str, torch.Tensor]]:
    """Train two steps, both sampled from version 0. order: of a step's groups, which gives them their positions."""
    document = team(maxStaleness=1, microbatchTokens=microbatch_tokens)
    async with harness.training(document):
        pass
    for step in range(STEPS):
        for name in AGENTS:
            for position, index in enumerate(order):
                await harness.assign(document, step, [index], agent=name, position=position, base_version=step)
        await log(harness, document, step, [None])
    async with harness.trainer():
        await versions(harness, document, STEPS)
    names = [f"{document.uid}-t{step * GROUPS + index}" for step in range(STEPS) for index in order]
    for name in AGENTS:
        assert [one for made in (await harness.history(document, name))[::-1] for one in made.consumed] == names
    return {name: load(tensors) for name, tensors in (await adapters(harness, document)).items()}


async def test_asynchronous_agents_have_the_same_adapters_up_to_rounding_in_any_order_and_any_micro_batches(harness):
    expected = await asynchronously(harness, (0, 1, 2))
    for order, microbatch_tokens in (((2, 0, 1), 64), ((0, 1, 2), 1 << 20)):
        found = await asynchronously(await harness.another(), order, microbatch_tokens)
        for agent, tensors in expected.items():
            for name, value in tensors.items():
                assert torch.allclose(found[agent][name], value, rtol=0, atol=ROUNDING), name
                assert (value != 0).any()

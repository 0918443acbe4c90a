"""Two agents of a job whose groups come in any order and in batches of any size: the same sums, and so the same adapters."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.harness import WITHIN_S
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api.messages import GroupReady, JobDocument
from marlaas_worker.trainer.intake import StepInbox

AGENTS = ("solver", "verifier")
STEPS, GROUPS = 2, 3
IN_ORDER, BACKWARDS = (0, 1, 2, None), (None, 2, 1, 0)
"""A step's positions, and None for its end, in the order in which they are logged."""


def team() -> JobDocument:
    made = job(groupsPerStep=GROUPS)
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

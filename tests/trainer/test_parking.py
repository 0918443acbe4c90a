"""More agents than the trainer's memory has room for: each ends with the bits that it has when all fit."""

import asyncio
from collections import Counter

import pytest
from tests.harness import WITHIN_S, kill_at
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api.messages import GroupReady
from marlaas_worker.trainer import agent_memory
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.agent_memory import AgentMemory
from marlaas_worker.trainer.intake import StepInbox


def parked(harness: TrainerHarness, name: str = "trainer-0") -> dict[str, float]:
    samples = harness.metrics[name].samples()
    return {one.labels["job"]: one.value for one in samples if one.name == "marlaas_trainer_parked_total"}


@pytest.fixture
def parks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Times that agents were parked, by job."""
    found, park = Counter[str](), AgentTrainer._park

    async def counted(trainer: AgentTrainer, inbox: StepInbox) -> None:
        found[trainer.lease.record.uid] += 1
        await park(trainer, inbox)

    monkeypatch.setattr(AgentTrainer, "_park", counted)
    return found


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch):
    """Give later trainers memory for so many agents."""

    def give(num: int) -> None:
        monkeypatch.setattr(agent_memory, "measure", lambda *_: AgentMemory(num * 8, 1))

    return give


async def test_agents_that_do_not_fit_together_end_as_they_do_when_all_fit(
    harness: TrainerHarness, room_for, parks: Counter[str]
) -> None:
    documents = [job(f"job-{number}") for number in range(4)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    assert not parks
    room_for(2)
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(*documents, steps=3) == expected
    assert parks.total() >= 4


async def test_a_step_that_waits_for_groups_is_begun_again_for_an_agent_that_can_commit(
    harness: TrainerHarness, room_for, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = asyncio.Event(), StepInbox.take

    def observed(inbox: StepInbox, group: GroupReady) -> None:
        take(inbox, group)
        taken.set()

    waiting, due = job("waiting"), job("due")
    other = await harness.another()
    expected = await other.trained(waiting, due, steps=1)
    room_for(1)
    async with harness.training(waiting, due), asyncio.timeout(WITHIN_S):
        monkeypatch.setattr(StepInbox, "take", observed)
        await harness.assign(waiting, 0, [0])
        await taken.wait()
        await harness.step(due, 0)
        await harness.version(due, 1)
        assert parked(harness)["waiting"] >= 1
        await harness.assign(waiting, 0, [1])
        await harness.close(waiting, 0, 2)
        await harness.version(waiting, 1)
    assert [await harness.adapter(one) for one in (waiting, due)] == expected


async def test_killed_while_agents_are_parked_they_go_on_to_the_same_bits(harness: TrainerHarness, room_for) -> None:
    documents = [job(f"job-{number}") for number in range(3)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    room_for(1)
    kill_at("trainer.commit.after_set", 5)
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(*documents, steps=3) == expected
    assert parks
    assert harness.deaths == ["trainer.commit.after_set"]

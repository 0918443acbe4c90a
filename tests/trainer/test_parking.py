"""More agents than the trainer's memory has room for: each ends with the bits that it has when all fit."""

import asyncio
from collections import Counter

import pytest
from tests.harness import WITHIN_S
from tests.killing import kill_at
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api.blobs import BlobRef
from marlaas_api.messages import GroupReady, JobDocument
from marlaas_worker.trainer import agent_memory
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.agent_memory import AgentMemory
from marlaas_worker.trainer.compute import NOBODY, Compute
from marlaas_worker.trainer.compute_queue import ComputeAccount
from marlaas_worker.trainer.intake import StepInbox
from marlaas_worker.trainer.residence import Residence
from marlaas_worker.trainer.version_cache import CachedVersion


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
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Versions that were read from the blob store to be restored, by job."""
    found, read = Counter[str](), Residence._read

    async def counted(residence: Residence, ref: BlobRef) -> CachedVersion:
        found[residence._assignment.ref.name] += 1
        return await read(residence, ref)

    monkeypatch.setattr(Residence, "_read", counted)
    return found


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch):
    """Give later trainers memory for so many agents, and host memory for this many bytes of versions."""

    def give(num: int, host_bytes: int = 0) -> None:
        monkeypatch.setattr(agent_memory, "measure", lambda *_: AgentMemory(num * 8, 1, host_bytes))

    return give


async def test_agents_that_do_not_fit_together_end_as_they_do_when_all_fit(harness, room_for, parks) -> None:
    documents = [job(f"job-{number}") for number in range(4)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    assert not parks
    room_for(2)
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(*documents, steps=3) == expected
    assert parks.total() >= 2


async def test_a_step_that_waits_for_groups_is_begun_again_for_an_agent_that_can_commit(harness, room_for, monkeypatch):
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


async def test_killed_while_agents_are_parked_they_go_on_to_the_same_bits(harness, room_for, parks) -> None:
    documents = [job(f"job-{number}") for number in range(3)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    room_for(1)
    kill_at("trainer.commit.after_set", 5)
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(*documents, steps=3) == expected
    assert parks.total() >= 2
    assert harness.deaths == ["trainer.commit.after_set"]


@pytest.mark.parametrize("host_bytes", [1 << 30, 1], ids=["host memory for all", "for none"])
async def test_restored_from_host_memory_agents_have_the_bits_that_they_have_from_the_blob_store(
    harness: TrainerHarness, room_for, parks: Counter[str], reads: Counter[str], host_bytes
) -> None:
    """With KL references, a fixed one and one that follows the policy, and running means of rewards."""
    baselines = {"baseline": {"type": "running-mean"}}
    references = [{}, {"coefficient": 0.1, "reference": {"versionsBehind": 1}}]
    documents = [job(f"job-{number}", kl=kl, **baselines) for number, kl in enumerate(references)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    room_for(1, host_bytes)
    async with harness.training(*documents), asyncio.timeout(WITHIN_S):
        for step in range(3):
            for document in documents:
                await harness.play(document, 1, first=step)
        assert [await harness.adapter(document) for document in documents] == expected
    assert parks.total() >= 5
    assert bool(reads) == (host_bytes == 1)


async def rebound(harness: TrainerHarness, document: JobDocument) -> None:
    """Train a job's first version, and release it."""
    async with harness.training(document):
        pass
    await harness.admit(document, admitted=False)


async def test_a_rebound_agent_without_work_takes_no_memory(harness: TrainerHarness, room_for, parks) -> None:
    resting, busy = job("resting"), job("busy")
    await rebound(harness, resting)
    room_for(1)
    async with harness.training(busy), asyncio.timeout(WITHIN_S):
        await harness.admit(resting)
        await harness.report(lambda found: len(found.bound) == 2)
        await harness.play(busy, 1)
        assert not parks
        await harness.play(resting, 1)
        await harness.play(busy, 1, first=1)
    assert parks.total() >= 2


async def test_an_agent_that_waits_for_memory_goes_to_another_trainer_at_once(harness, room_for, monkeypatch) -> None:
    """The agent that has the memory computes for long, and does not leave it meanwhile. Of two equal agents the first by name moves."""
    busy, waits = job("busy"), job("a")
    computes, goes_on, run = asyncio.Event(), asyncio.Event(), Compute.run

    async def long(compute: Compute, work, account: ComputeAccount = NOBODY, num_tokens: int = 0):
        if num_tokens and account.job == busy.uid:
            computes.set()
            await goes_on.wait()
        return await run(compute, work, account, num_tokens)

    monkeypatch.setattr(Compute, "run", long)
    room_for(1)
    async with harness.training(busy), asyncio.timeout(WITHIN_S):
        await harness.step(busy, 0)
        await computes.wait()
        await harness.admit(waits)
        await harness.committed(waits, lambda record: record.holder == "trainer-0")
        async with harness.trainer("trainer-1"):
            record = await harness.version(waits, 0)
            goes_on.set()
            assert record.holder == "trainer-1"

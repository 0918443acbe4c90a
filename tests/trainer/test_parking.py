"""More agents than the trainer's memory has room for: each ends with the bits that it has when all fit."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.harness import WITHIN_S, pool_document
from tests.killing import kill_at
from tests.tables import rows
from tests.trainer.harness import Clock, assignment_of, job
from tests.trainer.test_learner import away

from marlaas_api.blobs import BlobRef
from marlaas_api.errors import InvalidInput
from marlaas_api.numeric import trained_bytes
from marlaas_worker.orchestrator.capacity import PoolCapacity, trainer_bytes
from marlaas_worker.trainer.agent import AgentTrainer
from marlaas_worker.trainer.intake import StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import TrainingState
from marlaas_worker.trainer.residence import Residence
from marlaas_worker.trainer.room import (
    QUANTUM_S,
    AgentMemory,
    AgentRoom,
    Pause,
    measure,
    memory_limit,
    refuse_small_card,
)
from marlaas_worker.trainer.versions import CachedVersion, VersionCache


def parked(harness, name="trainer-0"):
    samples = harness.metrics[name].samples()
    return {one.labels["job"]: one.value for one in samples if one.name == "marlaas_trainer_parked_total"}


def counted(monkeypatch, owner, name):
    """Count the calls of a method."""
    found, call = Counter(), getattr(owner, name)

    async def count(*arguments):
        found[name] += 1
        return await call(*arguments)

    monkeypatch.setattr(owner, name, count)
    return found


@pytest.fixture
def room_for(monkeypatch):
    """Give later trainers memory for so many agents, and host memory for this many bytes of versions."""

    def give(num, host_bytes=0):
        monkeypatch.setattr(
            "marlaas_worker.trainer.room.measure", lambda *_: AgentMemory(num * 8, 1, host_bytes, 1 << 30)
        )

    return give


async def test_a_step_that_waits_for_groups_is_begun_again_for_an_agent_that_can_commit(harness, room_for, monkeypatch):
    taken, take = asyncio.Event(), StepInbox.take

    def observed(inbox, group):
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


@pytest.mark.slow
async def test_killed_while_agents_are_parked_they_go_on_to_the_same_bits(harness, room_for, monkeypatch):
    parks = counted(monkeypatch, AgentTrainer, "_park")
    documents = [job(f"job-{number}", baseline={"type": "running-mean"}) for number in range(3)]
    other = await harness.another()
    expected = await other.trained(*documents, steps=3)
    room_for(1)
    kill_at("trainer.commit.after_set", 5)
    async with asyncio.timeout(WITHIN_S):
        assert await harness.trained(*documents, steps=3) == expected
    assert parks.total() >= 2
    assert harness.deaths == ["trainer.commit.after_set"]


@pytest.mark.parametrize("host_bytes", [1 << 30, 1], ids=["host memory for all", "for none"])
async def test_restored_from_host_memory_agents_have_the_same_bits(harness, room_for, monkeypatch, host_bytes):
    """With KL references, a fixed one and one that follows the policy, and running means of rewards."""
    parks, reads = counted(monkeypatch, AgentTrainer, "_park"), counted(monkeypatch, Residence, "_read")
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


@pytest.mark.parametrize(("files", "limit"), rows(__file__, "cgroups"))
def test_the_limit_is_that_of_the_container_in_both_versions_of_cgroups(tmp_path, files, limit):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def pool(**fields: object):
    return pool_document(Path("m"), trainer={"activationBytes": "100"}).model_copy(update=fields)


@pytest.mark.parametrize(("device", "limit", "estimate", "expected"), rows(__file__, "machines"))
def test_the_room_is_known_on_every_machine(base, monkeypatch, device, limit, estimate, expected):
    """0.8 x (3100 - 1000 - 100); 0.8 x (10000 / 2 - 100). With an accelerator a quarter of the host's free memory keeps versions."""
    monkeypatch.setattr("marlaas_worker.trainer.room.memory_limit", lambda: limit)
    monkeypatch.setattr("marlaas_worker.trainer.room.resident_bytes", lambda: 1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    monkeypatch.setattr(base, "device", torch.device(device))
    memory = measure(base, pool(agent_room_bytes=estimate))
    assert [memory.room_bytes, memory.host_bytes] == expected


def test_unset_activations_are_three_quarters_of_what_a_card_has_left(base, tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (9 << 30, 1 << 30))
    monkeypatch.setattr(base, "device", torch.device("cuda"))
    memory = measure(base, pool_document(tiny_model))
    assert memory.activation_bytes / 2**30 == pytest.approx(0.75 * (9 - 0.75), abs=0.01), "without the head's logits"
    assert memory.room_bytes == int(0.8 * ((9 << 30) - memory.activation_bytes))
    given = measure(base, pool_document(tiny_model, trainer={"activationBytes": "8Gi"}))
    half = (9 << 30) // 2
    assert [given.activation_bytes, given.room_bytes] == [half, int(0.8 * half)], "what agents get, activations leave"
    with pytest.raises(InvalidInput, match=r"a trainer needs 1.5 GiB, and 0.9 GiB may be used .in GiB, weights 0.0 "):
        refuse_small_card(pool_document(tiny_model))


@pytest.mark.parametrize(("agent", "kl", "epochs", "copies"), rows(__file__, "references"))
def test_a_kl_reference_that_is_not_the_base_model_is_one_copy_more_and_so_are_first_parameters(
    base, tmp_path, agent, kl, epochs, copies
):
    path = {"path": str(away(base, tmp_path / "start"))}
    agent = {"initFrom": path} if agent else {}
    kl |= {"reference": path} if "path" in kl.get("reference", {}) else {}
    document = job(agent=agent, kl=kl, epochs=epochs)
    (policy,) = document.spec.agents
    assert trained_bytes(8, document.spec.num_copies(policy), 4) == 8 * copies
    assert trainer_bytes(document, "tiny", PoolCapacity(8, 16, bytes_per_rank=4)) == 8 * copies
    learner = Learner(base, assignment_of(document))
    weights = sum(parameter.numel() for parameter in base.attach(8, 16, ()).parameters.values())
    assert 8 * measure(base, pool()).bytes_per_rank == 4 * 4 * weights
    learner.begin()
    follows = "versionsBehind" in kl.get("reference", {})
    assert follows or (learner._reference is not None) == (copies == 5)


def version_ref(name):
    return BlobRef(name=name, sha256=name[-1] * 64, size_bytes=1)


def held(name, num=1):
    """A version of 16 bytes for each number."""
    tensors = {"w": torch.zeros(num)}
    state = TrainingState(first_moments=tensors, second_moments=tensors, initial=tensors)
    return CachedVersion(version_ref(name), tensors, state)


def kept(cache, names):
    return "".join(name for name in names if cache.get(name, version_ref(name)))


def test_versions_are_kept_within_the_bound_and_the_least_recently_used_one_is_dropped_first():
    cache = VersionCache(48)
    for name in "abc":
        cache.put(name, held(name))
    assert kept(cache, "a") == "a"
    cache.put("d", held("d"))
    assert kept(cache, "abcd") == "acd"
    assert cache.get("a", version_ref("c")) is None, "the very version that is asked for"
    cache.put("e", held("e", 2))
    assert kept(cache, "acde") == "de"
    cache.put("d", held("large", 4))
    assert cache.get("d", version_ref("d")) is cache.get("d", version_ref("large")) is None
    cache.put("f", held("f"))
    assert kept(cache, "ef") == "ef", "the dropped bytes are free again"


class Room(AgentRoom):
    """A room for 10 with a clock of its own; `woken`: how often each agent was woken."""

    def __init__(self):
        self.clock, self.woken = Clock(), Counter[str]()
        super().__init__(10, self.clock)

    def asks(self, agent, need, is_due=False):
        return self.enter(agent, need, is_due, lambda: self.woken.update([agent]))


@pytest.fixture
def room():
    return Room()


def test_agents_without_work_leave_first_and_of_them_the_one_that_entered_first(room):
    for agent in "abc":
        assert room.asks(agent, 3)
        room.clock.at += QUANTUM_S
    assert [room.pause("a", Pause.AFTER_STEP), room.pause("b", Pause.BETWEEN_STEPS)] == [False, False]
    room.pause("c", Pause.BETWEEN_STEPS)
    assert not room.asks("d", 4)
    assert room.woken == {"b": 1}
    assert room.pause("b", Pause.BETWEEN_STEPS)
    room.leave("b")
    assert room.woken == {"b": 1, "d": 1}
    assert room.asks("d", 4)


def test_due_agents_enter_before_those_that_came_earlier_and_one_that_withdraws_lets_the_next_one_in(room):
    assert room.asks("a", 10)
    assert not any(room.asks(agent, 10, is_due) for agent, is_due in (("b", False), ("c", False), ("d", True)))
    room.leave("a")
    assert room.woken == {"d": 1}
    assert [room.asks("b", 10), room.asks("d", 10, is_due=True)] == [False, True]
    room.leave("d")
    room.leave("b")
    assert (room.woken["b"], room.woken["c"]) == (1, 1)
    assert room.asks("c", 10)


@dataclass
class Agent:
    """An agent that trains steps of some groups, as `AgentTrainer` does."""

    name: str
    room: AgentRoom
    need: int
    num_groups: int
    is_here: bool = False
    taken: int = 0
    arrived: int = 0
    committed: int = 0
    begun_again: int = 0

    @property
    def is_due(self):
        return self.arrived == self.num_groups

    @property
    def has_work(self):
        return self.arrived > 0 and (self.taken < self.arrived or self.is_due)

    def turn(self):
        if self.is_here and self.room.pause(self.name, self._pause()):
            self.begun_again += self.taken > 0
            self.taken, self.is_here = 0, False
            self.room.leave(self.name)
        if not self.is_here and self.arrived:
            self.is_here = self.room.enter(self.name, self.need, self.is_due, lambda: None)
        if self.is_here and self.has_work:
            self._work()

    def _pause(self):
        if self.taken:
            return Pause.BUSY if self.has_work else Pause.WITHIN_STEP
        return Pause.AFTER_STEP if self.has_work else Pause.BETWEEN_STEPS

    def _work(self):
        if self.taken < self.arrived:
            self.taken += 1
        else:
            self.committed, self.taken, self.arrived = self.committed + 1, 0, 0


@pytest.mark.parametrize("seed", range(50))
def test_random_schedules_end_and_never_overfill_the_room(seed):
    """A group of a step arrives only after all agents have committed the step before, so agents wait for one another."""
    chance, clock = random.Random(seed), Clock()
    size, num_steps = chance.randint(5, 12), 6
    room = AgentRoom(size, clock)
    agents = [Agent(str(at), room, chance.randint(1, size), chance.randint(1, 4)) for at in range(chance.randint(2, 7))]
    for _ in range(20_000):
        clock.at += chance.random() * QUANTUM_S
        agent, behind = chance.choice(agents), min(one.committed for one in agents)
        if chance.random() < 0.3 and agent.committed == behind < num_steps and not agent.is_due:
            agent.arrived += 1
        agent.turn()
        assert sum(one.need for one in agents if one.is_here) <= size
        if behind == num_steps:
            break
    assert {one.committed for one in agents} == {num_steps}
    assert sum(one.begun_again for one in agents) <= num_steps * len(agents)

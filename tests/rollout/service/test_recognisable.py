"""Never another agent's adapter: in 1,000 random episodes every turn is drawn under the adapter that its group is pinned to.

Four agents speak at the same time, in branches: two policies, a second role of the first, and its past versions. Versions
are committed meanwhile, and the engine has fewer slots than versions in use. Each adapter signs what it draws: the engine
writes the mean of the weights in its slot. What each agent said is compared with what each policy trains on.
"""

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from tests.rollout.service.asking import Job
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import LIMITS, CharacterTokenizer, ScriptedEngine, adapter_files, mean_of

from marlaas_api import subjects, wire
from marlaas_api.messages import ChatMessage, GroupReady, Pin, StopReason, TrajectoryRef, Turn
from marlaas_api.names import BRANCH_TURNS, turn_number
from marlaas_worker.adapters import read_adapter
from marlaas_worker.rollout.engine import Began, Completion, LoadedAdapter, Sampling, unheard
from marlaas_worker.sandbox.turns import TurnClient, TurnTimeouts
from marlaas_worker.trainer.trajectories import Expectation, read_group
from marlaas_worker.trainer.weighing import segments_of

GROUPS, MEMBERS, VERSIONS = 500, 2, 5
ROLES = {"policy": "policy", "other": "other", "second": "policy", "past": "policy"}
AGENTS = [
    {"name": "policy"},
    {"name": "other"},
    {"name": "second", "policy": {"of": "policy"}},
    {"name": "past", "policy": {"of": "policy", "versions": "past"}},
]


def seed_of(policy: str, version: int) -> int:
    return version + 1 + (100 if policy == "other" else 0)


@pytest.fixture(scope="module")
def signatures(tmp_path_factory) -> dict[tuple[str, int], str]:
    """What each version of each policy signs with."""
    found = {}
    for policy in ("policy", "other"):
        for version in range(VERSIONS):
            folder = tmp_path_factory.mktemp(f"{policy}{version}")
            for name, data in adapter_files(seed_of(policy, version)).items():
                (folder / name).write_bytes(data)
            found[policy, version] = f"{mean_of(read_adapter(folder)[0]):+.5f}"
    assert len(set(found.values())) == len(found)
    return found


@dataclass
class SigningEngine(ScriptedEngine):
    """Draws the signature of the weights in the slot, then random letters."""

    drawn: dict[str, list[int]] = field(default_factory=dict)
    signatures: dict[LoadedAdapter, str] = field(default_factory=dict)

    async def load(self, adapter: LoadedAdapter) -> str:
        digest = await super().load(adapter)
        self.signatures[adapter] = f"{mean_of(read_adapter(self._held[adapter])[0]):+.5f}"
        return digest

    async def unload(self, adapter: LoadedAdapter) -> None:
        await super().unload(adapter)
        del self.signatures[adapter]

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        self._check()
        rng = random.Random(sampling.seed)
        signature = self.signatures[adapter]
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.001)))
        assert self.signatures[adapter] == signature, "the slot changed under a request"
        ids = CharacterTokenizer().encode(f"{signature}{rng.choice('abc')}~")
        self.drawn[request.rpartition("/")[0]] = ids
        return Completion(tuple(ids), tuple(-rng.random() for _ in ids), StopReason.STOP)


async def converse(client: TurnClient, job: Job, group: int, member: int, role: str, part: int) -> list[int]:
    """One part of an agent: random turns, also several from one state; returns those from which none goes on."""
    rng = random.Random(f"{group}/{member}/{role}/{part}")
    parents: dict[int, int | None] = {}
    for own in range(rng.randint(1, 2)):
        number = turn_number(part * BRANCH_TURNS + own, list(ROLES).index(role), len(ROLES))
        parent = rng.choice([None, *parents])
        append = (ChatMessage(role="user", content=rng.choice(("go", "on", "?"))),)
        await client.generate(job.request(group, member, number, agent=role, parent=parent, append=append), 60.0)
        parents[number] = parent
    return [number for number in parents if number not in parents.values()]


async def play(client: TurnClient, job: Job, group: int, member: int) -> dict[str, tuple[int, ...]]:
    """All agents at the same time, some with two parts; returns their leaves."""
    rng = random.Random(f"{group}/{member}")
    plays = [(role, part) for role in ROLES for part in (1, 2) if rng.random() < 0.4]
    ends = await asyncio.gather(*(converse(client, job, group, member, role, part) for role, part in plays))
    leaves: dict[str, list[int]] = defaultdict(list)
    for (role, _), end in zip(plays, ends, strict=True):
        leaves[role] += end
    return {role: tuple(sorted(own)) for role, own in leaves.items()}


async def read_turns(harness: RolloutHarness, job: Job) -> list[Turn]:
    stored = await harness.bus.replay(subjects.TURNS, subjects.turn(job.document.namespace, job.document.job, "*", "*"))
    return [await wire.unpack(one.data, harness.blobs) for one in stored]


async def play_all(
    harness: RolloutHarness, job: Job
) -> tuple[dict[int, list[dict[str, tuple[int, ...]]]], dict[str, int]]:
    """Play all groups while versions are committed; return each group's leaves by member, and the pinned past versions."""
    pins: dict[str, int] = {}

    async def commit(version: int) -> None:
        for policy in ("policy", "other"):
            await harness.commit(job, version, seed=seed_of(policy, version), agent=policy)

    async def play_group(client: TurnClient, index: int) -> list[dict[str, tuple[int, ...]]]:
        newest = index * VERSIONS // GROUPS
        if index and newest != (index - 1) * VERSIONS // GROUPS:
            await commit(newest)
        name = job.request(index).group
        pins[name] = random.Random(index).randint(0, newest)
        key = subjects.pin_key(job.document.namespace, job.document.job, "past", name)
        await harness.put(subjects.PINS, key, Pin(version=pins[name]))
        return [await play(client, job, index, member) for member in range(MEMBERS)]

    await commit(0)
    played: dict[int, list[dict[str, tuple[int, ...]]]] = {}
    async with TurnClient(harness.bus, TurnTimeouts(silence_s=5.0)) as client:
        for first in range(0, GROUPS, 20):
            indices = range(first, first + 20)
            found = await asyncio.gather(*(play_group(client, index) for index in indices))
            played |= dict(zip(indices, found, strict=True))
    return played, pins


async def test_every_turn_of_every_agent_is_of_its_pinned_adapter_and_trains_its_own_policy(harness, signatures):
    engine = SigningEngine(limits=replace(LIMITS, slots=5))
    engine.open.set()
    await harness.replica(engine=engine)
    job = await harness.job(agents=AGENTS, rollout={"groupSize": MEMBERS, "maxTurns": 8})
    played, pins = await play_all(harness, job)
    versions: dict[tuple[str, str], set[int]] = defaultdict(set)
    for turn in await read_turns(harness, job):
        assert turn.text.startswith(signatures[ROLES[turn.agent], turn.version]), turn
        versions[turn.agent, turn.group].add(turn.version)
    assert all(len(found) == 1 for found in versions.values()), "one version for each group and agent"
    assert set().union(*versions.values()) == set(range(VERSIONS)), "every version played"
    for (agent, group), found in versions.items():
        if agent == "past":
            assert found == {pins[group]}
        if agent == "second":
            assert versions.get(("policy", group), found) == found
    for index, members in played.items():
        for policy in ("policy", "other"):
            await assert_trained_as_said(harness, job, engine, versions, index, policy, members)


async def assert_trained_as_said(harness, job, engine, versions, index, policy, members) -> None:
    """The segments of a policy hold each token that its roles drew in the group once, and no other agent's."""
    name = job.request(index).group
    roles = [role for role, played in ROLES.items() if played == policy and role != "past"]
    refs = [
        TrajectoryRef(
            member=member,
            episode=job.request(index, member).episode,
            leaves=leaves[role],
            reward=0.0,
            agent="" if role == policy else role,
        )
        for role in roles
        for member, leaves in enumerate(members)
        if role in leaves
    ]
    found = {version for role in roles for version in versions.get((role, name), ())}
    if not refs:
        return
    ready = GroupReady(
        **job.request().model_dump(include={"namespace", "job", "uid"}),
        agent=policy,
        group=name,
        **{"step": 0, "base_version": 0, "position": 0, "index": index, "version": found.pop()},
        trajectories=tuple(refs),
    )
    assert not found
    for ref, own in zip(
        refs, await read_group(harness.bus, harness.blobs, ready, Expectation(1.0, 2**31, {})), strict=True
    ):
        trained = [token for part in segments_of(own.turns, own.leaves, 1.0) for token in part.ids[part.generated]]
        said = [token for number in own.turns for token in engine.drawn[f"{ref.episode}.{number}"]]
        assert sorted(trained) == sorted(said)
        assert {turn.agent for turn in own.turns.values()} == {ref.agent or policy}

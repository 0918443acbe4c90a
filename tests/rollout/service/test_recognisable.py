"""Never another agent's adapter: in 120 random episodes every turn is drawn under the adapter that its group is pinned to.

Four agents speak at the same time, in branches: two policies, a second role of the first, and its past versions. Versions
are committed meanwhile, and the engine has fewer slots than versions in use. Each adapter signs what it draws: the engine
writes the mean of the weights in its slot.
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
from marlaas_api.messages import ChatMessage, Pin, StopReason, Turn
from marlaas_api.names import BRANCH_TURNS, turn_number
from marlaas_worker.adapters import read_adapter
from marlaas_worker.rollout.engine import Began, Completion, LoadedAdapter, Sampling, unheard
from marlaas_worker.sandbox.turns import TurnClient, TurnTimeouts

GROUPS, MEMBERS, VERSIONS = 60, 2, 5
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
        return Completion(tuple(ids), tuple(-rng.random() for _ in ids), StopReason.STOP)


async def converse(client: TurnClient, job: Job, group: int, member: int, role: str, part: int) -> None:
    """One part of an agent: random turns, also several from one state."""
    rng = random.Random(f"{group}/{member}/{role}/{part}")
    parents: list[int | None] = [None]
    for own in range(rng.randint(1, 2)):
        number = turn_number(part * BRANCH_TURNS + own, list(ROLES).index(role), len(ROLES))
        append = (ChatMessage(role="user", content=rng.choice(("go", "on", "?"))),)
        request = job.request(group, member, number, agent=role, parent=rng.choice(parents), append=append)
        await client.generate(request, 60.0)
        parents.append(number)


async def play(client: TurnClient, job: Job, group: int, member: int) -> None:
    """All agents at the same time, some with two parts."""
    rng = random.Random(f"{group}/{member}")
    plays = [(role, part) for role in ROLES for part in (1, 2) if rng.random() < 0.4]
    await asyncio.gather(*(converse(client, job, group, member, role, part) for role, part in plays))


async def play_all(harness: RolloutHarness, job: Job) -> dict[str, int]:
    """Play all groups while versions are committed; return the pinned past versions."""
    pins: dict[str, int] = {}

    async def play_group(client: TurnClient, index: int) -> None:
        newest = index * VERSIONS // GROUPS
        if index == 0 or newest != (index - 1) * VERSIONS // GROUPS:
            for policy in ("policy", "other"):
                await harness.commit(job, newest, seed=seed_of(policy, newest), agent=policy)
        name = job.request(index).group
        pins[name] = random.Random(index).randint(0, newest)
        key = subjects.pin_key(job.document.namespace, job.document.job, "past", name)
        await harness.put(subjects.PINS, key, Pin(version=pins[name]))
        await asyncio.gather(*(play(client, job, index, member) for member in range(MEMBERS)))

    async with TurnClient(harness.bus, TurnTimeouts(silence_s=5.0)) as client:
        for first in range(0, GROUPS, 6):
            await asyncio.gather(*(play_group(client, index) for index in range(first, first + 6)))
    return pins


async def test_every_turn_of_every_agent_is_of_its_pinned_adapter(harness, signatures):
    engine = SigningEngine(limits=replace(LIMITS, slots=5))
    engine.open.set()
    await harness.replica(engine=engine)
    job = await harness.job(agents=AGENTS, rollout={"groupSize": MEMBERS, "maxTurns": 8})
    pins = await play_all(harness, job)
    versions: dict[tuple[str, str], set[int]] = defaultdict(set)
    for stored in await harness.bus.replay(subjects.TURNS, "turn.>"):
        turn = wire.decode_as(Turn, stored.data)
        assert turn.text.startswith(signatures[ROLES[turn.agent], turn.version]), turn
        versions[turn.agent, turn.group].add(turn.version)
    assert all(len(found) == 1 for found in versions.values()), "one version for each group and agent"
    assert set().union(*versions.values()) == set(range(VERSIONS)), "every version played"
    for (agent, group), found in versions.items():
        if agent == "past":
            assert found == {pins[group]}
        if agent == "second":
            assert versions.get(("policy", group), found) == found

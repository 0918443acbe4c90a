"""Never another agent's adapter: in 120 random episodes every turn is drawn under the adapter that its group is pinned to.

Four agents speak at the same time, in branches: two policies, a second role of the first, and its past versions. Versions
are committed meanwhile, and the engine has fewer slots than versions in use. Each adapter signs what it draws: the engine
writes the mean of the weights in its slot.
"""

import asyncio
import random
from collections import defaultdict
from dataclasses import replace

from tests.rollout.service.scripted import LIMITS, SELF_TEST, CharacterTokenizer, ScriptedEngine, gain, write_version
from tests.tables import data

from marlaas_api import subjects, wire
from marlaas_api.messages import ChatMessage, StopReason, Turn
from marlaas_api.names import BRANCH_TURNS, turn_number
from marlaas_worker.rollout.engine import Completion
from marlaas_worker.sandbox.turns import TurnClient, TurnTimeouts

GROUPS, MEMBERS, VERSIONS = 60, 2, 5
SEEDS = {"policy": 1, "other": 101}
ROLES = {"policy": "policy", "other": "other", "second": "policy", "past": "policy"}
AGENTS = data(__file__, "agents")


class SigningEngine(ScriptedEngine):
    """Draws the signature of the weights in the slot, then a random letter."""

    def signature(self, adapter):
        return f"{gain(self._held[adapter]):+.5f}"

    async def generate(self, request, adapter, prompt_ids, sampling, began=None):
        if adapter.name.startswith(SELF_TEST):
            return await super().generate(request, adapter, prompt_ids, sampling)
        self._check()
        rng, signature = random.Random(sampling.seed), self.signature(adapter)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.001)))
        assert self.signature(adapter) == signature, "the slot changed under a request"
        ids = CharacterTokenizer().encode(f"{signature}{rng.choice('abc')}~")
        return Completion(tuple(ids), tuple(-rng.random() for _ in ids), StopReason.STOP)


async def converse(client, job, group, member, role, part):
    """One part of an agent: random turns, also several from one state."""
    rng = random.Random(f"{group}/{member}/{role}/{part}")
    parents = [None]
    for own in range(rng.randint(1, 2)):
        number = turn_number(part * BRANCH_TURNS + own, list(ROLES).index(role), len(ROLES))
        append = (ChatMessage(role="user", content=rng.choice(("go", "on", "?"))),)
        request = job.request(group, member, number, agent=role, parent=rng.choice(parents), append=append)
        await client.generate(request, 60.0)
        parents.append(number)


async def play_all(harness, job):
    """Play all groups while versions are committed, all agents at the same time, some with two parts; return the pinned past versions."""
    pins = {}

    async def play_group(client, index):
        newest = index * VERSIONS // GROUPS
        if index == 0 or newest != (index - 1) * VERSIONS // GROUPS:
            for policy, first in SEEDS.items():
                await harness.commit(job, newest, seed=first + newest, agent=policy)
        request = job.request(index, agent="past")
        pins[request.group] = random.Random(index).randint(0, newest)
        await harness.pin(request, pins[request.group])
        plays = []
        for member in range(MEMBERS):
            rng = random.Random(f"{index}/{member}")
            plays += [(member, role, part) for role in ROLES for part in (1, 2) if rng.random() < 0.4]
        await asyncio.gather(*(converse(client, job, index, *play) for play in plays))

    async with TurnClient(harness.bus, TurnTimeouts(silence_s=5.0)) as client:
        for first in range(0, GROUPS, 6):
            await asyncio.gather(*(play_group(client, index) for index in range(first, first + 6)))
    return pins


async def test_every_turn_of_every_agent_is_of_its_pinned_adapter(harness, tmp_path):
    engine = SigningEngine(limits=replace(LIMITS, slots=5))
    engine.open.set()
    await harness.replica(engine=engine)
    job = await harness.job(agents=AGENTS, rollout={"groupSize": MEMBERS, "maxTurns": 8})
    pins, versions, signatures = await play_all(harness, job), defaultdict(set), {}
    for policy, first in SEEDS.items():
        for version in range(VERSIONS):
            write_version(tmp_path / "signs", first + version)
            signatures[policy, version] = f"{gain(tmp_path / 'signs'):+.5f}"
    assert len({*signatures.values()}) == len(signatures)
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

"""The trainer's harness: trainers on a bus in memory, with the orchestrator's, the rollout role's and the sandbox's part of the loop."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from tests.harness import Harness, a_turn, identity, job_document, pool_document

from marlaas_api import subjects, wire
from marlaas_api.messages import (
    AgentClosed,
    GroupDecided,
    GroupReady,
    GroupUnused,
    JobDocument,
    Meter,
    StepClosed,
    StopReason,
    TrajectoryRef,
    Turn,
)
from marlaas_api.names import derive_seed, episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.trainer import service
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.trained_agent import Timing
from marlaas_worker.trainer.trajectories import Expectation, read_group
from marlaas_worker.trainer.weighing import weighing

TIMING = Timing()


@dataclass
class Clock:
    at: float = 1000.0

    def __call__(self):
        return self.at


class TrainerHarness(Harness):
    """Trainers, and the parts of orchestrator, rollout and sandbox. tamper: changes turns before they are recorded."""

    clock: Clock

    def __init__(self, model, scratch, sampler):
        super().__init__(scratch, clock=Clock())
        self.model, self.sampler = model, sampler
        self.tamper: Callable[[Turn], Turn | None] = lambda turn: turn

    @property
    def pool(self):
        return pool_document(self.model, trainer={"threads": 1})

    async def another(self):
        made = TrainerHarness(self.model, self.scratch / "another", self.sampler)
        await made.bus.ensure()
        return made

    # a trainer ------------------------------------------------------------------------------------------------------

    async def serve(self, context):
        await service.serve(context, self.pool, TIMING)

    def trainer(self, name="trainer-0"):
        return self.role(name, self.serve)

    @contextlib.asynccontextmanager
    async def training(self, *documents: JobDocument, name="trainer-0"):
        for document in documents:
            await self.admit(document)
        async with self.trainer(name):
            for document in documents:
                for agent in document.spec.agents:
                    await self.version(document, 0, agent.name)
            yield

    async def trained(self, *documents: JobDocument, steps=2):
        async with self.training(*documents), asyncio.TaskGroup() as tasks:
            for document in documents:
                tasks.create_task(self.play(document, steps))
        return [await self.adapter(document) for document in documents]

    async def report(self, wanted, name="trainer-0"):
        return await self.reported(wanted, "trainer", name)

    async def let_time_pass(self):
        while True:
            self.clock.at += 1.0
            self.server.wake()
            await asyncio.sleep(1.0)

    # the orchestrator -----------------------------------------------------------------------------------------------

    async def assign(self, document, step, positions, *, agent="policy", **changes: Any):
        """Log groups of a step, their turns being recorded."""
        record = await self.record(document, agent)
        for position in positions:
            group = await self._group(document, step, position, record)
            await self.log(document, group.model_copy(update=changes))

    async def close(self, document, step, num_groups, base_version=None, *, agent="policy", follows=None):
        base = (await self.record(document, agent)).version if base_version is None else base_version
        part = AgentClosed(**identity(document), agent=agent, step=step, base_version=base, num_groups=num_groups)
        await self.log(document, part.model_copy(update={"follows": follows}))

    async def step(self, document, step):
        await self.assign(document, step, range(document.spec.training.groups_per_step))
        await self.close(document, step, document.spec.training.groups_per_step)

    async def play(self, document, steps, first=0):
        """Play the other roles in strict mode: each step's groups are sampled from the version before it."""
        for step in range(first, first + steps):
            await self.version(document, step)
            await self.step(document, step)
        await self.version(document, first + steps)

    async def log(self, document, part):
        """Log what is decided for one agent."""
        names = identity(document) | {"step": part.step}
        if isinstance(part, AgentClosed):
            entry = StepClosed(**names, parts=(part,))
        else:
            kind = "unused" if isinstance(part, GroupUnused) else "ready"
            entry = GroupDecided(**names, index=part.index, **{kind: (part,)})
        await self.bus.publish(subjects.job_log(document.namespace, document.job), wire.encode(entry))

    # rollout and sandbox --------------------------------------------------------------------------------------------

    async def _group(self, document, step, position, record):
        index = step * document.spec.training.groups_per_step + position
        name = train_group(document.ref, index)
        manifest = await self.manifest(record.manifest)
        weights = load(await self.blobs.get(manifest.files[TENSORS_FILE]))
        (number,) = (n for n, agent in enumerate(document.spec.agents) if agent.name == manifest.agent)
        self.sampler.merge(weights, document.spec.agents[number].adapter.alpha / manifest.rank)
        # all at once: another job's group may be sampled, with its own weights, while a turn is published
        members = range(document.spec.rollout.group_size)
        turns = [self._turn(document, manifest, (name, member, number)) for member in members]
        refs = []
        for member, turn in enumerate(turns):
            recorded = self.tamper(turn)
            if recorded is not None:
                await self.publish_turn(recorded)
            reward = float(np.mean(np.frombuffer(turn.output_ids, np.int32) % 2 == 0)) + 0.1 * member
            refs.append(TrajectoryRef(member=member, episode=turn.episode, leaves=(number,), reward=reward))
        place = {"agent": manifest.agent, "step": step, "position": position, "group": name, "index": index}
        versions = {"base_version": record.version, "version": record.version}
        return GroupReady(**identity(document), **place, **versions, trajectories=tuple(refs))

    def _turn(self, document, manifest, at):
        """An agent's turn. at: group, member, and the turn's number, which is the agent's."""
        group, member, number = at
        seed = derive_seed(document.seed, group.removeprefix(document.uid), member) + number
        prompt = [seed // 7**place % VOCABULARY for place in range(3 + seed % 4)]
        temperature = document.spec.rollout.temperature
        ids, logprobs = self.sampler.sample(prompt, 2 + seed % 5, temperature, seed)
        names = {"agent": manifest.agent, "group": group, "member": member, "episode": episode_id(group, member, 1)}
        policy = {"version": manifest.version, "adapter_sha256": manifest.files[TENSORS_FILE].sha256}
        drawn = {"prompt_ids": pack_ids(prompt), "output_ids": pack_ids(ids), "logprobs": pack_logprobs(logprobs)}
        meter = Meter(prompt_tokens=len(prompt), output_tokens=len(ids))
        rest = {"stop_reason": StopReason.LENGTH, "temperature": temperature, "meter": meter, "at": self.clock()}
        return a_turn(number, **identity(document), **names, **policy, **drawn, **rest)

    async def publish_turn(self, turn):
        await self.bus.publish(subjects.turn("team-a", turn.job, turn.episode, turn.turn), wire.encode(turn))

    # committed versions ---------------------------------------------------------------------------------------------

    async def version(self, document, version, agent="policy"):
        return await self.committed(document, lambda record: record.version >= version, agent)

    async def weights(self, manifest):
        return dict(load(await self.blobs.get(manifest.files[TENSORS_FILE])))

    async def groups(self, document, step):
        found = []
        expected = Expectation(document.spec.rollout.temperature, VOCABULARY, {})
        for stored in await self.bus.replay(subjects.GROUPS, subjects.job_log("team-a", document.job)):
            entry = wire.decode(stored.data)
            for message in entry.ready if isinstance(entry, GroupDecided) and entry.step == step else ():
                group = await read_group(self.bus, self.blobs, message, expected)
                found += weighing(document.spec.training, document.spec.rollout.max_tokens).segments([group])
        return found


def job(name="sums", *, agent=None, **training: Any):
    """A small strict job on the pool `tiny`."""
    small = {"steps": 4, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 64}
    spec = {
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}, **(agent or {})}],
        "rollout": {"groupSize": 3, "temperature": 0.8},
        "training": {**small, "optimizer": {"learningRate": 3e-3}, **training},
        "checkpoint": {"keep": 1},
    }
    return job_document(name, seed=3, spec=spec)


def assignment_of(document):
    return Assignment(document, document.spec.agents[0])


VOCABULARY = 61


class Sampler:
    """Plain transformers with an adapter merged into its weights: knows nothing of the trainer's code."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._plain = {name: value.clone() for name, value in self._model.state_dict().items()}

    def merge(self, adapter, scaling):
        weights = {name: value.clone() for name, value in self._plain.items()}
        for name in (name for name in adapter if ".lora_A." in name):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scaling * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        self._model.load_state_dict(weights)

    @torch.no_grad()
    def logprobs(self, ids, temperature=1.0):
        """Logprobs [T - 1, V] of what follows each id."""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([list(ids)])).logits[0]
        return (logits / temperature).log_softmax(-1)

    def sample(self, prompt, num_tokens, temperature, seed):
        draw = torch.Generator().manual_seed(seed)
        ids, logprobs = list(prompt), []
        for _ in range(num_tokens):
            row = self.logprobs(ids, temperature)[-1]
            ids.append(int(torch.multinomial(row.exp(), 1, generator=draw)))
            logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs

"""The trainer's harness: trainers on a bus in memory, with the orchestrator's, the rollout role's and the sandbox's part of the loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load
from tests.harness import Harness, a_turn, identity, job_document, pool_document
from tests.trainer.sampler import VOCABULARY, Sampler
from torch import Tensor

from marlaas_api import subjects, wire
from marlaas_api.messages import (
    GroupLogEntry,
    GroupReady,
    JobDocument,
    Manifest,
    Meter,
    PolicyRecord,
    PoolDocument,
    ReplicaReport,
    StepClosed,
    StopReason,
    TrajectoryRef,
    Turn,
)
from marlaas_api.names import derive_seed, episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer import service
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.rows import Segment
from marlaas_worker.trainer.shared import Timing
from marlaas_worker.trainer.trajectories import Expectation, read_group
from marlaas_worker.trainer.weighing import weighing

TIMING = Timing()


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    at: float = 1000.0

    def __call__(self) -> float:
        return self.at


Apart = Callable[[Callable[["TrainerHarness"], Coroutine[Any, Any, Any]]], Any]
"""Runs a coroutine function with a harness of its own, in a loop of its own."""


class TrainerHarness(Harness):
    """Trainers, and the parts of orchestrator, rollout and sandbox. tamper: changes turns before they are recorded."""

    clock: Clock

    def __init__(self, model: Path, scratch: Path, sampler: Sampler) -> None:
        super().__init__(scratch, clock=Clock())
        self.model, self.sampler = model, sampler
        self.tamper: Callable[[Turn], Turn | None] = lambda turn: turn

    @property
    def pool(self) -> PoolDocument:
        """The pool that the trainers are of."""
        return pool_document(self.model, trainer={"threads": 1})

    async def another(self) -> "TrainerHarness":
        """A second harness, of which this one knows nothing."""
        made = TrainerHarness(self.model, self.scratch / "another", self.sampler)
        await made.bus.ensure()
        return made

    # a trainer ------------------------------------------------------------------------------------------------------

    async def serve(self, context: RoleContext) -> None:
        await service.serve(context, self.pool, TIMING)

    def trainer(self, name: str = "trainer-0") -> contextlib.AbstractAsyncContextManager[asyncio.Task[None]]:
        """A trainer, restarted under its name whenever it is killed, and drained at the end."""
        return self.role(name, self.serve)

    @contextlib.asynccontextmanager
    async def training(self, *documents: JobDocument, name: str = "trainer-0") -> AsyncIterator[None]:
        """A trainer that has bound these jobs."""
        for document in documents:
            await self.admit(document)
        async with self.trainer(name):
            for document in documents:
                for agent in document.spec.agents:
                    await self.version(document, 0, agent.name)
            yield

    async def trained(self, *documents: JobDocument, steps: int = 2) -> list[bytes]:
        """Adapters after some strict steps of jobs that are trained at the same time."""
        async with self.training(*documents), asyncio.TaskGroup() as tasks:
            for document in documents:
                tasks.create_task(self.play(document, steps))
        return [await self.adapter(document) for document in documents]

    async def report(self, wanted: Callable[[ReplicaReport], bool], name: str = "trainer-0") -> ReplicaReport:
        return await self.reported(wanted, "trainer", name)

    async def let_time_pass(self) -> None:
        """Let the test's clock follow the loop's."""
        while True:
            self.clock.at += 1.0
            self.server.wake()
            await asyncio.sleep(1.0)

    # the orchestrator -----------------------------------------------------------------------------------------------

    async def assign(
        self, document: JobDocument, step: int, positions: Sequence[int], *, agent: str = "policy", **changes: Any
    ) -> None:
        """Log groups of a step, their turns being recorded."""
        record = await self.record(document, agent)
        for position in positions:
            group = await self._group(document, step, position, record)
            await self.log(document, group.model_copy(update=changes))

    async def close(
        self,
        document: JobDocument,
        step: int,
        num_groups: int,
        base_version: int | None = None,
        *,
        agent: str = "policy",
        follows: int | None = None,
    ) -> None:
        """Log that a step has all its groups."""
        base = (await self.record(document, agent)).version if base_version is None else base_version
        entry = StepClosed(**identity(document), agent=agent, step=step, base_version=base, num_groups=num_groups)
        await self.log(document, entry.model_copy(update={"follows": follows}))

    async def step(self, document: JobDocument, step: int) -> None:
        """Log all groups of a step, sampled from the present version, and that it is closed."""
        await self.assign(document, step, range(document.spec.training.groups_per_step))
        await self.close(document, step, document.spec.training.groups_per_step)

    async def play(self, document: JobDocument, steps: int, first: int = 0) -> None:
        """Play the other roles in strict mode: each step's groups are sampled from the version before it."""
        for step in range(first, first + steps):
            await self.version(document, step)
            await self.step(document, step)
        await self.version(document, first + steps)

    async def log(self, document: JobDocument, message: GroupLogEntry) -> None:
        subject = subjects.group(document.namespace, document.job, message.agent)
        await self.bus.publish(subject, wire.encode(message))

    # rollout and sandbox --------------------------------------------------------------------------------------------

    async def _group(self, document: JobDocument, step: int, position: int, record: PolicyRecord) -> GroupReady:
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

    def _turn(self, document: JobDocument, manifest: Manifest, at: tuple[str, int, int]) -> Turn:
        """An agent's turn. at: group, member, and the turn's number, which is the agent's."""
        group, member, number = at
        seed = derive_seed(document.seed, group.removeprefix(document.uid), member) + number
        prompt = [seed // 7**place % VOCABULARY for place in range(3 + seed % 4)]
        temperature = document.spec.rollout.temperature
        ids, logprobs = self.sampler.sample(prompt, 2 + seed % 5, temperature, seed)
        return a_turn(
            number,
            **identity(document),
            agent=manifest.agent,
            group=group,
            member=member,
            episode=episode_id(group, member, 1),
            version=manifest.version,
            adapter_sha256=manifest.files[TENSORS_FILE].sha256,
            prompt_ids=pack_ids(prompt),
            output_ids=pack_ids(ids),
            logprobs=pack_logprobs(logprobs),
            stop_reason=StopReason.LENGTH,
            temperature=temperature,
            meter=Meter(prompt_tokens=len(prompt), output_tokens=len(ids)),
            at=self.clock(),
        )

    async def publish_turn(self, turn: Turn) -> None:
        await self.bus.publish(subjects.turn("team-a", turn.job, turn.episode, turn.turn), wire.encode(turn))

    # committed versions ---------------------------------------------------------------------------------------------

    async def version(self, document: JobDocument, version: int, agent: str = "policy") -> PolicyRecord:
        """Wait until a version is committed."""
        return await self.committed(document, lambda record: record.version >= version, agent)

    async def weights(self, manifest: Manifest) -> dict[str, Tensor]:
        return dict(load(await self.blobs.get(manifest.files[TENSORS_FILE])))

    async def groups(self, document: JobDocument, step: int) -> list[list[Segment]]:
        """Segments of a step's groups, weighed by the environment's rewards."""
        found = []
        expected = Expectation(document.spec.rollout.temperature, VOCABULARY, {})
        for stored in await self.bus.replay(subjects.GROUPS, subjects.group("team-a", document.job, "policy")):
            message = wire.decode(stored.data)
            if isinstance(message, GroupReady) and message.step == step:
                group = await read_group(self.bus, self.blobs, message, expected)
                found += weighing(document.spec).segments([group])
        return found


def job(name: str = "sums", *, agent: Mapping[str, Any] | None = None, **training: Any) -> JobDocument:
    """A small strict job on the pool `tiny`."""
    small = {"steps": 4, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 64}
    spec = {
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}, **(agent or {})}],
        "rollout": {"groupSize": 3, "temperature": 0.8},
        "training": {**small, "optimizer": {"learningRate": 3e-3}, **training},
        "checkpoint": {"keep": 1},
    }
    return job_document(name, seed=3, spec=spec)


def assignment_of(document: JobDocument) -> Assignment:
    return Assignment(document, document.spec.agents[0])

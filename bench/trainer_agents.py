"""CPU of a trainer per step with many agents: `python -m bench trainer --agents 32`.

One trainer trains all agents over the in-memory bus and a folder as the blob store. The other roles are played: each
step is one group of 8 episodes of two turns, published when the version before it is committed. Time is CPU time of
the thread that works; the played roles are not counted. Parts are counted with everything that they call.

With `--fit 3`, it is measured twice: with memory for all agents, and for so many. Then agents take turns in memory: they are
parked and restored from the blob store. A third line has the milliseconds of one park and of one restore, and their share.
"""

import asyncio
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from marlaas_api import subjects, wire
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import (
    AgentClosed,
    GroupDecided,
    GroupReady,
    JobDocument,
    Manifest,
    Meter,
    Phase,
    PolicyRecord,
    PoolDocument,
    Progress,
    StepClosed,
    StopReason,
    TrajectoryRef,
    Turn,
)
from marlaas_api.names import episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer import agent, compute, learner, model, room, service, versions
from marlaas_worker.trainer.room import AgentMemory

GROUP, PROMPT_TOKENS, REPLY_TOKENS, TURNS = 8, 48, (6, 24), 2
PARK, RESTORE = "parking", "restoring"
PARTS: dict[str, tuple[Any, str]] = {
    "compute thread": (compute.Compute, "_attempt"),
    "switching": (model.BaseModel, "_activate"),
    "gradients": (learner.Learner, "accumulate"),
    "optimizer step": (learner.Learner, "step"),
    "probes": (learner.Learner, "measure"),
    "serialising": (agent, "contents_of"),
}
RESTORING: dict[str, tuple[Any, str]] = {
    "making learners": (learner.Learner, "__init__"),
    RESTORE: (learner.Learner, "restore"),
    "reading adapters": (versions, "read_adapter"),
    "reading states": (versions, "read_state"),
}
"""Parts of restoring a parked agent."""
PARKING: dict[str, tuple[Any, str]] = {PARK: (learner.Learner, "close")}
RANK = 16


class Spent:
    """CPU seconds and calls of functions, by the name of their part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Count a function from now on."""
        function = getattr(owner, name)
        setattr(owner, name, self.counted(part, function))

    def counted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - began
                self.calls[part] += 1

        return count


class Played:
    """The other roles: one job's documents, turns and groups."""

    def __init__(self, server: MemoryServer, blobs: Any, pool: PoolDocument, number: int, spent: Spent) -> None:
        self._bus, self._blobs, self._spent = server.connect(f"played-{number}"), blobs, spent
        spec = {
            "poolRef": {"name": pool.name},
            "agents": [{"name": "policy", "adapter": {"rank": RANK, "alpha": 2 * RANK}}],
            "environment": {"name": "calculator"},
            "rollout": {"groupSize": GROUP},
            "training": {"steps": 1000, "groupsPerStep": 1, "maxStaleness": 0},
        }
        self.document = JobDocument(
            namespace="bench",
            job=f"job-{number}",
            uid=f"uid-{number}",
            pool=pool.name,
            tenant=f"tenant-{number % 4}",
            seed=number,
            spec=job_spec(RLJobSpec.model_validate(spec)),
        )
        self._draw = np.random.default_rng(number)

    async def admit(self) -> None:
        """Write document and progress."""
        key = subjects.job_key("bench", self.document.job)
        progress = Progress(
            namespace="bench", job=self.document.job, uid=self.document.uid, phase=Phase.RUNNING, admitted=True,
            reason="Admitted", steps=1000,
        )  # fmt: skip
        await (await self._bus.bucket(subjects.JOBS)).put(key, wire.encode(self.document))
        await (await self._bus.bucket(subjects.PROGRESS)).put(key, wire.encode(progress))

    async def play(self, steps: range) -> None:
        """Publish each step's group when the version before it is committed, and wait for the last version."""
        for step in steps:
            record = await self._version(step)
            began = time.thread_time()
            manifest = wire.decode_as(Manifest, await self._blobs.get(record.manifest))
            group, turns = self._group(step, record.version, manifest)
            for turn in turns:
                await self._bus.publish(subjects.turn("bench", turn.job, turn.episode, turn.turn), wire.encode(turn))
            ids = {"namespace": "bench", "job": self.document.job, "uid": self.document.uid}
            end = AgentClosed(**ids, agent="policy", step=step, base_version=record.version, num_groups=1)
            decided = GroupDecided(**ids, step=step, index=group.index, ready=(group,))
            for message in (decided, StepClosed(**ids, step=step, parts=(end,))):
                await self._bus.publish(subjects.job_log("bench", self.document.job), wire.encode(message))
            self._spent.seconds["played roles"] += time.thread_time() - began
        await self._version(steps.stop)

    async def _version(self, version: int) -> PolicyRecord:
        key = f"bench.{self.document.job}.policy"
        async with (await self._bus.bucket(subjects.POLICY)).watch() as changes:
            async for entry in changes:
                if entry.key == key and entry.data is not None:
                    record = wire.decode_as(PolicyRecord, entry.data)
                    if record.version >= version:
                        return record
        raise AssertionError("the watch ended")

    def _group(self, step: int, version: int, manifest: Manifest) -> tuple[GroupReady, list[Turn]]:
        name = train_group(self.document.ref, step)
        prompt = self._draw.integers(0, 96, PROMPT_TOKENS)
        turns, refs = [], []
        for member in range(GROUP):
            for number in range(TURNS):
                context = prompt if not number else self._draw.integers(0, 96, 8)
                turns.append(self._turn((name, member, number), version, manifest, context))
            refs.append(
                TrajectoryRef(
                    member=member,
                    episode=episode_id(name, member, 1),
                    leaves=(TURNS - 1,),
                    reward=float(self._draw.normal()),
                )
            )
        ids = {"namespace": "bench", "job": self.document.job, "uid": self.document.uid, "agent": "policy"}
        return GroupReady(
            **ids, step=step, base_version=version, position=0, group=name, index=step, version=version,
            trajectories=tuple(refs),
        ), turns  # fmt: skip

    def _turn(self, at: tuple[str, int, int], version: int, manifest: Manifest, context: Any) -> Turn:
        group, member, number = at
        ids = self._draw.integers(0, 96, int(self._draw.integers(*REPLY_TOKENS)))
        return Turn(
            namespace="bench", job=self.document.job, uid=self.document.uid, agent="policy", group=group,
            member=member, episode=episode_id(group, member, 1), turn=number, parent=number - 1 if number else None,
            version=version, adapter_sha256=manifest.files[TENSORS_FILE].sha256, opens_segment=not number, append="",
            prompt_ids=pack_ids(context.tolist()), output_ids=pack_ids(ids.tolist()),
            logprobs=pack_logprobs([-float(np.log(96))] * len(ids)), text="", stop_reason=StopReason.STOP,
            temperature=self.document.spec.rollout.temperature,
            meter=Meter(prompt_tokens=len(context), output_tokens=len(ids)), replica="rollout-0", at=0.0,
        )  # fmt: skip


def many(folder: Path, num_agents: int, num_steps: int, threads: int, num_fitting: int = 0) -> dict[str, Any]:
    """Return CPU milliseconds per step, in total and by part. num_fitting: agents that fit in memory; 0: all."""
    memory = AgentMemory(num_fitting * RANK, 1) if num_fitting else AgentMemory()
    with patch.object(room, "measure", lambda *_: memory):
        return asyncio.run(_measure(folder, num_agents, num_steps, threads))


async def _measure(folder: Path, num_agents: int, num_steps: int, threads: int) -> dict[str, Any]:
    spent = Spent()
    for part, (owner, name) in (PARTS | RESTORING | PARKING).items():
        spent.watch(part, owner, name)
    settings = {"model": {"path": str(folder)}, "trainer": {"threads": threads}}
    pool = PoolDocument(name="bench", model_path=str(folder), spec=pool_spec(ModelPoolSpec.model_validate(settings)))
    with tempfile.TemporaryDirectory() as scratch:
        server, blobs, stop = MemoryServer(time.time), open_blobs(Path(scratch) / "blobs"), asyncio.Event()
        await server.connect("bench").ensure()
        context = RoleContext("trainer-0", server.connect("trainer-0"), blobs, Path(scratch), stop)
        jobs = [Played(server, blobs, pool, number, spent) for number in range(num_agents)]
        for one in jobs:
            await one.admit()
        running = asyncio.create_task(service.serve(context, pool))
        await asyncio.gather(*(one.play(range(1)) for one in jobs))  # bind, and warm up
        spent.seconds.clear()
        spent.calls.clear()
        began, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(one.play(range(1, 1 + num_steps)) for one in jobs))
        total, wall = time.process_time() - began, time.perf_counter() - wall
        found = _results(spent, num_agents, num_agents * num_steps, total - spent.seconds["played roles"])
        stop.set()
        await running  # it closes all learners, which is no park
    return found | {"steps_per_s": round(num_agents * num_steps / wall, 2)}


def _results(spent: Spent, num_agents: int, steps: int, trainer_s: float) -> dict[str, Any]:
    """Return the figures of some steps of all agents. trainer_s: CPU seconds of the trainer."""
    parts = sorted(spent.seconds.items(), key=lambda item: -item[1])
    restoring = sum(spent.seconds[part] for part in RESTORING)
    return {
        "agents": num_agents,
        "steps": steps,
        "cpu_ms_per_step": round(1e3 * trainer_s / steps, 1),
        "ms": {part: round(1e3 * seconds / steps, 2) for part, seconds in parts},
        "parks": spent.calls[PARK],
        "park_ms": _mean_ms(spent.seconds[PARK], spent.calls[PARK]),
        "restores": spent.calls[RESTORE],
        "restore_ms": _mean_ms(restoring, spent.calls[RESTORE]),
        "parking_share": round((restoring + spent.seconds[PARK]) / trainer_s, 4),
    }


def _mean_ms(seconds: float, number: int) -> float:
    return round(1e3 * seconds / number, 2) if number else 0.0


def parking(found: dict[str, Any], num_fitting: int) -> dict[str, Any]:
    """Return what parking cost, of the figures of `many`: its share is of the trainer's CPU time."""
    names = ("agents", "steps", "parks", "park_ms", "restores", "restore_ms", "parking_share")
    return {"fit": num_fitting} | {name: found[name] for name in names}

"""The whole loop in one process: every real role over an in-memory bus, with the reference engine and the tiny model.

A role can be killed between any two effects, and is restarted under its own name, as a pod would be.
Environment code still runs in processes of its own.
"""

import asyncio
import contextlib
import os
import tempfile
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.harness import Harness, pool_document
from tests.killing import Killed
from tests.loop.recorded import Recorded

from marlaas_api import failpoints, subjects, wire
from marlaas_api.blobs import BlobRef
from marlaas_api.messages import Episode, JobDocument, Manifest, Progress, StepRecord, Turn
from marlaas_api.names import group_token
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.orchestrator import service as orchestrator
from marlaas_worker.rollout import service as rollout
from marlaas_worker.sandbox import service as sandbox
from marlaas_worker.trainer import service as trainer

ENVIRONMENTS = (Path(__file__).parent, Path(__file__).parents[1] / "sandbox")
"""Folders with the modules `teams`, `twins` and `rogues`, which only sandbox children import."""
JOB_S = 1500.0
"""Longest wait for the end of a job: a bound for a job that hangs, whatever else the machine does."""
POOL: ContextVar[str] = ContextVar("POOL")
"""The pool of the replica or trainer that runs now; failpoints may look at it."""


@dataclass(frozen=True)
class Ended:
    """A job that has ended, with all turns and episodes that were ever stored.

    histories: by policy, the manifests of all versions, the oldest first. newest: the blob of the last one. files: its adapter.
    """

    document: JobDocument
    progress: Progress
    steps: list[StepRecord]
    histories: dict[str, list[Manifest]]
    newest: dict[str, BlobRef]
    files: dict[str, dict[str, bytes]]
    turns: list[Turn]
    episodes: list[Episode]

    @property
    def manifests(self):
        parents = {
            name: [one.parent for one in found if one.parent is not None] for name, found in self.histories.items()
        }
        return {name: [*refs, self.newest[name]] for name, refs in parents.items()}

    @property
    def weights(self):
        """The sha256 of the weights of every version, the oldest first, by policy."""
        return {name: [one.files[TENSORS_FILE].sha256 for one in found] for name, found in self.histories.items()}

    @property
    def trained(self):
        return [{name: used.trained_tokens for name, used in step.usage.items()} for step in self.steps]

    @property
    def training_turns(self):
        return [turn for turn in self.turns if group_token(turn.group).startswith("t")]

    def consumed(self, agent):
        return [group for manifest in self.histories[agent] for group in manifest.consumed]

    def recorded(self, agent):
        return Recorded(agent, self.document.spec, [turn for turn in self.turns if turn.agent == agent], self.episodes)


def kill_at_each(places):
    """Kill a role at each of several failpoints, on the passes with the given numbers; return where it was killed.

    A place may end with `@POOL`: only passes of that pool's roles count. Of two tasks of a role that are killed at the same
    time, `Harness.deaths` may name one only: the role's end cancels the other.
    """
    passed, killed = Counter[str](), list[str]()

    def hook(name):
        for place in (name, f"{name}@{POOL.get('')}"):
            passed[place] += 1
            if passed[place] in places.get(place, ()):
                killed.append(place)
                raise Killed(name)

    failpoints.hook = hook
    return killed


class Loop(Harness):
    """Roles as tasks. Use as an async context manager.

    `Killed` sandboxes leave claimed tasks, which are delivered again at once, and never because time has passed.
    """

    def __init__(self, models, scratch, *, slots=8, trainers=1, half=(), **rollout: object):
        """models: base models by pool. trainers: of each pool. half: pools that compute in bfloat16. rollout: settings of each pool."""
        super().__init__(scratch)
        engine = {"engine": "reference", "dtype": "float32", "maxModelLen": 256} | rollout
        self._num_trainers = trainers
        engines = {name: engine | ({"dtype": "bfloat16"} if name in half else {}) for name in models}
        self.pools = [
            pool_document(model, name, adapterSlots=slots, maxRank=8, rollout=engines[name])
            for name, model in models.items()
        ]
        self._stops: dict[str, asyncio.Event] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._open = contextlib.AsyncExitStack()
        self._turns: list[bytes] = []
        self._episodes: dict[int, bytes] = {}

    async def __aenter__(self):
        patch = self._open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(subjects, "TASK_ACK_WAIT_S", 2 * JOB_S)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, ENVIRONMENTS)))
        await self.bus.ensure()
        await self._open.enter_async_context(self.bus.listen("turn.>", self._keep_turn))
        await self._open.enter_async_context(self.bus.listen("episode.>", self._keep_episodes))
        self._keep("orchestrator", orchestrator.serve)
        for pool in self.pools:
            await self._serve(pool)
        return self

    async def __aexit__(self, *_: object):
        failpoints.hook = None
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._open.aclose()

    async def _serve(self, pool):
        """Start the workers of a pool. With several trainers, wait until all are ready: they then share the agents."""

        async def sample_on(context):
            POOL.set(pool.name)
            await rollout.serve(context, pool)

        async def train_on(context):
            POOL.set(pool.name)
            await trainer.serve(context, pool)

        self._keep("rollout-0", sample_on)
        for number in range(self._num_trainers):
            self._keep(f"trainer-{number}", train_on)
        if self._num_trainers > 1:
            for number in range(self._num_trainers):
                await self.reported(lambda report: report.ready, "trainer", f"trainer-{number}", pool.name)

    async def _keep_turn(self, turn):
        """Keep a stored turn, which the orchestrator purges."""
        self._turns.append(turn.data)

    async def _keep_episodes(self, _):
        """Read the stream, which drops a second play of a member although it is published."""
        start = max(self._episodes, default=0) + 1
        self._episodes |= {one.sequence: one.data for one in await self.bus.replay("EPISODES", "episode.>", start)}

    async def context(self, name, **fields: Any):
        context = await super().context(name, **fields)
        return replace(context, scratch=Path(tempfile.mkdtemp(dir=context.scratch)))

    def _keep(self, name, serve):
        stop = self._stops[name] = asyncio.Event()
        self._keepers.append(asyncio.create_task(self.keep(name, serve, stop), name=name))

    def stop(self, name):
        """Ask a role to stop, of the last pool if several have one; if it is killed, it is not started again."""
        self._stops[name].set()

    async def submit(self, job):
        await super().submit(job)
        consumer = subjects.consumer(job.namespace, job.job, "sandbox")

        async def play(context):
            if (state := self.server.stream(subjects.TASKS).consumers.get(consumer)) is not None:
                state.pending = dict.fromkeys(state.pending, self.server.clock())  # of the sandbox that was killed
            await sandbox.serve(context, job)

        self._keep(f"sandbox-{job.job}", play)

    async def finished(self, job):
        """Wait for the job's end, and stop its sandbox. Raises whatever ended a role for good, should one end."""
        end = asyncio.create_task(self.progress(job, lambda progress: progress.phase.final, JOB_S))
        while not end.done():
            await asyncio.wait([end, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in [one for one in self._keepers if one.done()]:
                self._keepers.remove(keeper)
                keeper.result()  # raises what ended the role
        self.stop(f"sandbox-{job.job}")
        return end.result()

    async def ended(self, job):
        progress = await self.finished(job)
        names = [agent.name for agent in job.spec.policies]
        histories = {name: (await self.history(job, name))[::-1] for name in names}
        newest = {name: ref for name in names if (ref := (await self.record(job, name)).manifest) is not None}
        files = {
            name: {file: await self.blobs.get(ref) for file, ref in history[-1].files.items()}
            for name, history in histories.items()
        }
        turns = [await wire.unpack(data, self.blobs) for data in self._turns]
        episodes = [wire.decode_as(Episode, data) for _, data in sorted(self._episodes.items())]
        own = [one for one in turns if isinstance(one, Turn) and one.uid == job.uid]
        played = [one for one in episodes if one.uid == job.uid]
        return Ended(job, progress, await self.steps(job), histories, newest, files, own, played)

    async def play(self, jobs):
        jobs = list(jobs)
        for job in jobs:
            await self.submit(job)
        return {job.job: await self.ended(job) for job in jobs}

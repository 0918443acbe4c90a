"""The whole loop in one process: every real role over an in-memory bus, with the reference engine and the tiny model.

A role can be killed between any two effects (`kill_at`), and is restarted under its own name, as a pod would be.
Environment code still runs in processes of its own.
"""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.harness import Harness, Serve, job_document, pool_document
from tests.killing import Killed, kill_at

from marlaas_api import failpoints
from marlaas_api.messages import JobDocument, Manifest, Phase, PoolDocument, Progress, StepRecord
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.orchestrator import service as orchestrator
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout import service as rollout
from marlaas_worker.sandbox import service as sandbox
from marlaas_worker.trainer import service as trainer


def document(name: str = "reverse", *, seed: int = 7, environment: str = "reverse", **training: object) -> JobDocument:
    """A small job on the pool `tiny`."""
    settings = {"steps": 2, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 512, "maxRefill": 2} | training
    spec = {
        "environment": {"name": environment, "concurrency": 8},
        "rollout": {"groupSize": 4, "maxTokens": 16, "maxTurns": 4},
        "training": settings | {"optimizer": {"learningRate": 1e-3}},
        "evaluation": {"tasks": 2, "every": 100},
    }
    uid = hashlib.sha256(f"{name}{seed}".encode()).hexdigest()[:12]
    return job_document(name, uid=uid, seed=seed, spec=spec)


POOL: ContextVar[str] = ContextVar("POOL")
"""The pool of the replica or trainer that runs now; failpoints may look at it."""


def kill_at_each(places: Mapping[str, int], pool: str = "") -> list[str]:
    """Kill a role once at each of several failpoints, on the pass with the given number; return where it was killed.

    Of two tasks of a role that are killed at the same time, `Harness.deaths` may name one only: the role's end cancels the other.
    pool: only passes of its roles count.
    """
    passed, killed = Counter[str](), list[str]()

    def hook(name: str) -> None:
        if not pool or POOL.get("") == pool:
            passed[name] += 1
            if passed[name] == places.get(name):
                killed.append(name)
                raise Killed(name)

    failpoints.hook = hook
    return killed


class Loop(Harness):
    """Roles as tasks. Use as an async context manager."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        *,
        slots: int = 16,
        also: Mapping[str, Path] | None = None,
        trainers: int = 1,
        **rollout: object,
    ) -> None:
        """also: the base models of more pools, each with workers of its own; all pools have the same settings. trainers: of each pool."""
        super().__init__(scratch)
        self._num_trainers = trainers
        self._stops: dict[str, asyncio.Event] = {}
        engine = {"engine": "reference", "dtype": "float32", "maxModelLen": 256} | rollout
        self.pools = [
            pool_document(base, name, adapterSlots=slots, maxRank=8, rollout=engine)
            for name, base in {"tiny": model, **(also or {})}.items()
        ]
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Loop":
        await self.bus.ensure()
        self._keep("orchestrator", lambda c: orchestrator.serve(c))
        for pool in self.pools:
            await self._serve(pool)
        return self

    async def _serve(self, pool: PoolDocument) -> None:
        """Start the workers of a pool; transformers cannot load two models at once in one process."""

        async def sample_on(context: RoleContext) -> None:
            POOL.set(pool.name)
            await rollout.serve(context, pool)

        async def train_on(context: RoleContext) -> None:
            POOL.set(pool.name)
            await trainer.serve(context, pool)

        self._keep("rollout-0", sample_on)
        await self.reported(lambda report: "calibrate" in report.reason, "rollout", "rollout-0", pool.name)
        for number in range(self._num_trainers):
            name, is_last = f"trainer-{number}", number == self._num_trainers - 1
            self._keep(name, train_on)
            if self._num_trainers > 1 or not (is_last and pool is self.pools[-1]):
                await self.reported(lambda report: report.ready, "trainer", name, pool.name)

    async def __aexit__(self, *_: object) -> None:
        failpoints.hook = None
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def context(self, name: str, **fields: Any) -> RoleContext:
        """A context with a scratch folder of its own."""
        context = await super().context(name, **fields)
        return replace(context, scratch=Path(tempfile.mkdtemp(dir=context.scratch)))

    def _keep(self, name: str, serve: Serve) -> None:
        stop = self._stops[name] = asyncio.Event()
        self._keepers.append(asyncio.create_task(self.keep(name, serve, stop), name=name))

    def stop(self, name: str) -> None:
        """Ask a role to stop, of the last pool if several have one; if it is killed, it is not started again."""
        self._stops[name].set()

    async def ended(self, name: str) -> None:
        """Wait until a role has stopped."""
        (keeper,) = (task for task in self._keepers if task.get_name() == name)
        await keeper
        self._keepers.remove(keeper)

    async def submit(self, job: JobDocument) -> None:
        """Give a job to the loop, with a sandbox of its own."""
        await super().submit(job)
        self._keep(f"sandbox-{job.job}", lambda c: sandbox.serve(c, job))

    async def finished(self, job: JobDocument, timeout_s: float = 240.0) -> Progress:
        """Wait for the job's end. Raises whatever ended a role for good, should one end."""
        end = asyncio.create_task(self.progress(job, lambda progress: progress.phase.final, 2 * timeout_s))
        await asyncio.wait([end, *self._keepers], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
        if not end.done():
            end.cancel()
            raise TimeoutError(f"{job.ref} has not ended after {timeout_s:g} s")
        return end.result()

    async def manifests(self, job: JobDocument) -> list[Manifest]:
        """All versions of its first agent, oldest first."""
        return (await self.history(job, job.spec.agents[0].name))[::-1]


async def weights_of(loop: Loop, job: JobDocument) -> dict[str, list[str]]:
    """Return the sha256 of the weights of every version, the oldest first, of each agent."""
    histories = {agent.name: await loop.history(job, agent.name) for agent in job.spec.agents}
    return {name: [one.files[TENSORS_FILE].sha256 for one in history[::-1]] for name, history in histories.items()}


async def train(loop: Loop, job: JobDocument, timeout_s: float = 240.0) -> tuple[list[str], list[StepRecord]]:
    """Run a job to its end; return the sha256 of the weights of every version of its first agent, and the step records."""
    await loop.submit(job)
    level = await loop.finished(job, timeout_s)
    assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
    weights = await weights_of(loop, job)
    return weights[job.spec.agents[0].name], await loop.steps(job)


async def run(
    model: Path, folder: Path, job: JobDocument, *kill: Any, **rollout: object
) -> tuple[list[str], list[StepRecord], list[str]]:
    """Run a job in a loop of its own, with kills at a failpoint (`kill_at`); also return where roles died."""
    async with Loop(model, folder, **rollout) as loop:
        if kill:
            kill_at(*kill)
        weights, steps = await train(loop, job)
        return weights, steps, loop.deaths

"""A pool's real roles whose stages take simulated time: the engine of a replica and the micro-batches of a trainer sleep.

Everything around the stages is the product's: placement of agents, routing of requests, queues, loading and proof of
versions, leases, commits. Versions are published and proven with the tiny model.
"""

import asyncio
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from bench.simulated_sandboxes import POOL
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import PoolDocument, StopReason
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.adapters import DTYPES
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.engine import Began, Completion, LoadedAdapter, Sampling, unheard
from marlaas_worker.rollout.reference_engine import ReferenceEngine
from marlaas_worker.rollout.service import serve_engine
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer
from marlaas_worker.trainer.calibration import calibrate, engine_dtype, publish
from marlaas_worker.trainer.compute import NOBODY, Compute
from marlaas_worker.trainer.compute_queue import ComputeAccount
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.service import Trainer
from marlaas_worker.trainer.trained_agent import Timing, TrainerDependencies

MAX_SEQS, MAX_MODEL_LEN = 32, 256
KV_TOKENS = 1 << 16
"""Enough for all jobs, so that one replica admits as many as two."""
T = TypeVar("T")


class Bandwidth:
    """Tokens per second that all running requests share equally."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._each, self._at = 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, num_tokens: int) -> None:
        """Return when a request that begins now has got so many tokens."""
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._running, (self._each + num_tokens, next(self._numbers), done))
        self._schedule()
        try:
            await done
        except asyncio.CancelledError:
            self._advance()
            self._running = [one for one in self._running if one[2] is not done]
            heapq.heapify(self._running)
            self._schedule()
            raise

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._each += (now - self._at) * self._tokens_per_s / len(self._running)
        self._at = now

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            tokens = max(0.0, self._running[0][0] - self._each) * len(self._running)
            self._timer = asyncio.get_running_loop().call_later(tokens / self._tokens_per_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._each + 1e-6:
            done = heapq.heappop(self._running)[2]
            if not done.done():
                done.set_result(None)
        self._schedule()


class SimulatedEngine(ReferenceEngine):
    """The reference engine, whose generations sleep instead of computing. Loads, digests and scores are computed."""

    def __init__(self, model: Path, spec: PoolSpec, tokens_per_s: float) -> None:
        super().__init__(model, spec, frozenset())
        self._limits = replace(self._limits, kv_tokens=KV_TOKENS)
        self._bandwidth = Bandwidth(tokens_per_s)

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        """Return tokens of the prompt in random order, of a random number, after their time."""
        if adapter.name.startswith("self-test."):
            return await super().generate(request, adapter, prompt_ids, sampling, began)
        self._alive()
        draw = random.Random(sampling.seed)
        num_tokens = draw.randint(sampling.max_tokens // 3, sampling.max_tokens)
        with self._residents.using(adapter):
            began()
            await self._bandwidth.take(num_tokens)
        ids = tuple(draw.choices(prompt_ids.tolist(), k=num_tokens))
        return Completion(ids, (-math.log(self._base.vocab_size),) * num_tokens, StopReason.STOP)


class SimulatedCompute(Compute):
    """The trainer's compute thread, on which a micro-batch is not computed: it sleeps for the time of its padded tokens.

    So there is no gradient, and all versions of an agent have the same weights. Everything else is computed.
    """

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__(num_threads=1)
        self._tokens_per_s = tokens_per_s

    async def run(self, work: Callable[[], T], account: ComputeAccount = NOBODY, num_tokens: int = 0) -> T:
        """See `Compute.run`."""

        def sleep() -> T:
            time.sleep(num_tokens / self._tokens_per_s)
            return cast(T, np.zeros(0, np.float32))  # of `Learner.try_accumulate`: the micro-batch fits the device

        return await super().run(sleep if num_tokens else work, account, num_tokens)


def pool_of(model: Path, slots: int, name: str = POOL) -> PoolDocument:
    """Return the document of a pool. slots: adapter slots of each replica."""
    rollout = {"engine": "reference", "dtype": "float32", "maxModelLen": MAX_MODEL_LEN, "maxNumSeqs": MAX_SEQS}
    spec = {
        "model": {"path": str(model)},
        "adapterSlots": slots,
        "maxRank": 8,
        "rollout": rollout | {"agentsPerSlot": 1},
    }
    return PoolDocument(name=name, model_path=str(model), spec=pool_spec(ModelPoolSpec.model_validate(spec)))


async def serve_rollout(context: RoleContext, pool: PoolDocument, tokens_per_s: float) -> None:
    """Run a rollout replica until cancelled."""
    tokenizer = PretrainedTokenizer.load(pool.model_path)
    engine = SimulatedEngine(Path(pool.model_path), pool.spec, tokens_per_s)
    await serve_engine(context, pool.name, tokenizer, engine, pool.spec.rollout.agents_per_slot)


async def serve_trainer(context: RoleContext, pool: PoolDocument, tokens_per_s: float) -> None:
    """Run a trainer until cancelled: `trainer.service.serve` with another compute thread."""
    compute = SimulatedCompute(tokens_per_s)
    try:
        dtype = DTYPES[engine_dtype(pool)]
        model = await compute.run(lambda: BaseModel(pool.model_path, dtype=dtype))
        calibration = await compute.run(lambda: calibrate(model, pool))
        await publish(context, calibration)
        await Trainer(TrainerDependencies(context, model, compute, Timing(), calibration), pool.name).run()
    finally:
        compute.close()

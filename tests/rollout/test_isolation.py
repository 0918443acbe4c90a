"""Nobody else's adapter, on the real engine: eight agents of four jobs on three slots, each with an adapter that can be recognised.

`bench isolation` in small. Every recorded turn is scored again by transformers and PEFT under the version that it claims.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bench.isolation import GroupVersions, Result, Scorer, failures
from tests.rollout.conftest import Publish, Published
from tests.rollout.service.asking import Job
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import END, POOL, CharacterTokenizer

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef
from marlaas_api.messages import PoolDocument, PoolSpec, Turn
from marlaas_api.names import AdapterRef, turn_number
from marlaas_worker.rollout import reload_pace
from marlaas_worker.rollout.engine import Completion, Engine, EngineLimits, LoadedAdapter
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.service import serve_engine
from marlaas_worker.sandbox.turns import TurnClient, TurnTimeouts
from marlaas_worker.trainer.calibration import calibrate
from marlaas_worker.trainer.model import BaseModel

AGENTS = ("policy", "other")
JOBS, SLOTS, GROUPS, MEMBERS, CLIENTS, TOKENS = 4, 3, 100, 3, 16, 8


class SharedEngine:
    """The session's engine with fewer slots. It runs on after the role has stopped, and is empty then."""

    def __init__(self, engine: Engine, next_slot: Callable[[], int]) -> None:
        self._engine, self._next_slot = engine, next_slot
        self._held: dict[LoadedAdapter, LoadedAdapter] = {}
        self.base, self.start, self.healthy = engine.base, engine.start, engine.healthy

    @property
    def limits(self) -> EngineLimits:
        return replace(self._engine.limits, slots=SLOTS)

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    async def restart(self) -> None:
        raise AssertionError("the engine failed")

    async def stop(self) -> None:
        for adapter in list(self._held):
            await self.unload(adapter)

    async def load(self, adapter: LoadedAdapter) -> str:
        assert len(self._held) < SLOTS
        self._held[adapter] = replace(adapter, slot_id=self._next_slot())
        return await self._engine.load(self._held[adapter])

    async def unload(self, adapter: LoadedAdapter) -> None:
        if adapter in self._held:
            await self._engine.unload(self._held[adapter])
            del self._held[adapter]

    async def digest(self, adapter: LoadedAdapter) -> str:
        return await self._engine.digest(self._held[adapter])

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return await self._engine.score(self._held[adapter], ids)

    async def generate(self, request: str, adapter: LoadedAdapter, *arguments: Any) -> Completion:
        return await self._engine.generate(request, self._held[adapter], *arguments)


class SmallVocabulary(CharacterTokenizer):
    """Characters as ids below 96, which the small model knows."""

    def encode(self, text: str) -> list[int]:
        return [END if token == END else token - 30 for token in super().encode(text)]

    def decode(self, ids: Any) -> str:
        return super().decode([END if token == END else token + 30 for token in ids])

    def token_text(self, token: int) -> str:
        return "~" if token == END else chr(token + 30)


class WeightsHarness(RolloutHarness):
    """Publishes adapters of the small model, each with random weights of its own. folders: of their files."""

    def __init__(self, scratch: Path, make: Publish) -> None:
        super().__init__(scratch)
        self.folders: dict[AdapterRef, Path] = {}
        self._make, self._seeds = make, itertools.count(1)

    async def publish(
        self, job: Job, version: int, seed: int | None = None, agent: str = "policy", **changes: Any
    ) -> BlobRef:
        made: Published = self._make(next(self._seeds), version)
        adapter, proofs = job.adapter(version, agent), made.manifest
        self.folders[adapter] = made.folder
        files = {
            name: await self.blobs.put(adapter.blob_prefix, name, (made.folder / name).read_bytes())
            for name in proofs.files
        }
        fields = {"rank": proofs.rank, "tensor_digests": proofs.tensor_digests, "probes": proofs.probes}
        return await super().publish(job, version, agent=agent, files=files, **fields, **changes)


async def request_all(harness: WeightsHarness, jobs: list[Job]) -> dict[str, GroupVersions]:
    """Request turns of random agents from many clients at once, while version 1 of half of the agents is committed."""
    agents = [(job, agent) for job in jobs for agent in AGENTS]
    uncommitted = random.Random(0).sample(agents, len(agents) // 2)
    newest = {(job.uid, agent): 0 for job, agent in agents}
    groups: dict[str, GroupVersions] = {}
    indices = iter(range(GROUPS))

    async def play(client: TurnClient) -> None:
        for index in indices:
            if index and index % (GROUPS // len(agents)) == 0 and uncommitted:
                late, name = uncommitted.pop()
                await harness.commit(late, 1, agent=name)
                newest[late.uid, name] = 1
            draw = random.Random(index)
            job, agent = draw.choice(agents)
            turn = turn_number(0, AGENTS.index(agent), len(AGENTS))
            fields = {"agent": agent, "parent": None, "max_tokens": TOKENS}
            requests = [job.request(index, member, turn, **fields) for member in range(MEMBERS)]
            first, pinned = newest[job.uid, agent], None
            if draw.random() < 0.5:
                pinned = draw.randint(0, first)
                await harness.pin(requests[0], pinned)
            await asyncio.gather(*(client.generate(request, 600.0) for request in requests))
            groups[requests[0].group] = GroupVersions(first, newest[job.uid, agent], pinned)

    async with TurnClient(harness.bus, TurnTimeouts(silence_s=60.0)) as client:
        await asyncio.gather(*(play(client) for _ in range(CLIENTS)))
    return groups


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_every_turn_of_agents_that_page_is_drawn_under_its_own_adapter(
    vllm: Engine,
    small_model: Path,
    pool: PoolSpec,
    publish: Publish,
    slot_ids: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bound, value in (("MIN_QUANTUM_S", 0.01), ("MAX_QUANTUM_S", 0.01), ("MAX_RELOAD_SHARE", 1.0)):
        monkeypatch.setattr(reload_pace, bound, value)  # constant paging
    harness = WeightsHarness(tmp_path, publish)
    await harness.bus.ensure()
    calibration = calibrate(
        BaseModel(str(small_model)), PoolDocument(name=POOL, model_path=str(small_model), spec=pool)
    )
    await harness.put(subjects.CALIBRATIONS, subjects.calibration_key(POOL, calibration.dtype), calibration)
    context = await harness.context("rollout-0")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_engine(context, POOL, SmallVocabulary(), SharedEngine(vllm, slot_ids)))
        await harness.report("rollout-0", lambda report: report.ready)
        jobs = [
            await harness.job(f"job-{number}", agents=[{"name": name} for name in AGENTS]) for number in range(JOBS)
        ]
        for job in jobs:
            await harness.commit(job, 0, agent="other")
        groups = await request_all(harness, jobs)
        samples = {sample.name: int(sample.value) for sample in context.metrics.all_samples()}
        context.stop.set()
    stored = await harness.bus.replay(subjects.TURNS, subjects.turn("*", "*", "*", "*"))
    result = scored(harness.folders, [wire.decode_as(Turn, one.data) for one in stored], groups, samples, small_model)
    assert failures(result) == []
    assert len({(turn.uid, turn.agent) for turn in result.turns}) == JOBS * len(AGENTS)
    assert {turn.version for turn in result.turns} == {0, 1}


def scored(
    folders: dict[AdapterRef, Path],
    turns: list[Turn],
    groups: dict[str, GroupVersions],
    samples: dict[str, int],
    model: Path,
) -> Result:
    """Score all turns under their own adapters, and under another one."""

    def own(turn: Turn) -> AdapterRef:
        return AdapterRef(turn.namespace, turn.job, turn.uid, turn.agent, turn.version)

    def other(turn: Turn) -> Path:
        return next(folder for adapter, folder in folders.items() if adapter != own(turn))

    scorer = Scorer(model)
    return Result(
        turns=turns,
        groups=groups,
        gaps=scorer.differences_under(lambda turn: folders[own(turn)], turns),
        other_gaps=scorer.differences_under(other, turns),
        num_requests=GROUPS * MEMBERS,
        num_loads=samples["marlaas_rollout_loads_total"],
        num_reloads=samples["marlaas_rollout_reloads_total"],
        seconds=1.0,
    )

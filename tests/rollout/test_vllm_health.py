"""Health of a vLLM engine by its progress, with a fake of one run of its processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.rollout import vllm_engine
from marlaas_worker.rollout.engine_meter import ProgressWatch
from marlaas_worker.rollout.vllm_engine import VllmEngine


class Incarnation:
    """A run of vLLM that answers its health check if `answers`, and whose CPU time grows by `cpu_step_s` at each look."""

    def __init__(self, *, answers: bool, cpu_step_s: float) -> None:
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.llm = self
        self.progress = ProgressWatch()
        self.kv_tokens, self.step_tokens = 64, 512
        self._answers, self._cpu_step_s, self._cpu_s = answers, cpu_step_s, 0.0

    def cpu_s(self) -> float:
        self._cpu_s += self._cpu_step_s
        return self._cpu_s

    async def list_loras(self) -> None:
        if not self._answers:
            await asyncio.Event().wait()

    async def call(self, work: Any) -> Any:
        return await work

    def declare_down(self, reason: str) -> None:
        self.down.set_result(reason)


def engine_on(incarnation: Incarnation, small_model: Path, pool: PoolSpec, tmp_path: Path) -> VllmEngine:
    engine = VllmEngine(small_model, pool, frozenset({1}), tmp_path, answer_bound_s=0.01)
    engine._incarnation = incarnation  # type: ignore[assignment]
    return engine


async def test_an_engine_that_computes_without_an_answer_is_healthy(
    small_model: Path, pool: PoolSpec, tmp_path: Path
) -> None:
    engine = engine_on(Incarnation(answers=False, cpu_step_s=0.01), small_model, pool, tmp_path)
    assert await engine.healthy()
    assert (engine.limits.kv_tokens, engine.limits.step_tokens) == (64, 512)


async def test_an_engine_that_neither_answers_nor_computes_is_down(
    small_model: Path, pool: PoolSpec, tmp_path: Path
) -> None:
    incarnation = Incarnation(answers=False, cpu_step_s=0.0)
    assert not await engine_on(incarnation, small_model, pool, tmp_path).healthy()
    assert "neither answered nor computed" in incarnation.down.result()


async def test_an_engine_that_answers_but_makes_no_progress_is_down(
    small_model: Path, pool: PoolSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "STALL_S", 0.0001)
    incarnation = Incarnation(answers=True, cpu_step_s=0.0)
    engine = engine_on(incarnation, small_model, pool, tmp_path)
    assert await engine.healthy()
    assert await engine.healthy(), "an idle engine"
    engine._num_running = 2
    await asyncio.sleep(0.001)
    assert not await engine.healthy()
    assert "no progress with 2 requests" in incarnation.down.result()

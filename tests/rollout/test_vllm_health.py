"""Health of a vLLM engine by its progress, with a fake of one run of its processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.rollout import vllm_engine
from marlaas_worker.rollout.engine import EngineDown, LoadedAdapter
from marlaas_worker.rollout.engine_progress import EngineCounts, ProgressWatch, Standstill
from marlaas_worker.rollout.vllm_engine import VllmEngine

SHORT_S = 1e-6


class Incarnation:
    """A run of vLLM with two calls. At each look its CPU time has grown by `cpu_step_s` and its counters by `tokens`."""

    def __init__(self, *, answers: bool, cpu_step_s: float = 0.0, tokens: int = 0, busy_bound_s: float = 600.0) -> None:
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.llm = self
        self.progress = ProgressWatch(busy_bound_s)
        self.kv_tokens, self.step_tokens = 64, 512
        self.num_calls = 2
        self._answers, self._cpu_step_s, self._tokens, self._num_looks = answers, cpu_step_s, tokens, 0

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(tokens=self._tokens * self._num_looks)

    def standstill(self, has_work: bool) -> Standstill:
        self._num_looks += 1
        cpu_s, now = self._cpu_step_s * self._num_looks, asyncio.get_running_loop().time()
        return self.progress.look(has_work, self.counts, cpu_s, now)

    async def list_loras(self) -> None:
        if not self._answers:
            await asyncio.Event().wait()

    async def remove_lora(self, slot_id: int) -> None:
        raise Exception("Call to remove_lora method failed: out of threads")

    async def call(self, work: Any) -> Any:
        return await work

    def declare_down(self, reason: str) -> None:
        self.down.set_result(reason)


@pytest.fixture
def engine(small_model: Path, pool: PoolSpec, tmp_path: Path) -> VllmEngine:
    return VllmEngine(small_model, pool, frozenset({1}), tmp_path, answer_bound_s=0.01)


def run(engine: VllmEngine, incarnation: Incarnation) -> None:
    engine._incarnation = incarnation  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("incarnation", "num_calls", "reason"),
    [
        ({"tokens": 1, "busy_bound_s": SHORT_S}, 2, ""),  # its counters move
        ({"cpu_step_s": 60.0}, 2, ""),  # it computes within the bound of one step
        ({"cpu_step_s": 60.0, "busy_bound_s": SHORT_S}, 2, "uses the CPU, but has made no progress"),
        ({}, 0, "neither answered nor computed"),  # even if nothing waits for it
    ],
)
async def test_an_engine_that_does_not_answer_is_judged_by_its_progress(
    engine: VllmEngine, incarnation: dict[str, Any], num_calls: int, reason: str
) -> None:
    made = Incarnation(answers=False, **incarnation)
    made.num_calls = num_calls
    run(engine, made)
    assert await engine.healthy() is not bool(reason)
    assert reason in (made.down.result() if reason else "")
    assert [await engine.healthy() for _ in range(2)] == [not reason] * 2
    assert (engine.limits.kv_tokens, engine.limits.step_tokens) == (64, 512)


async def test_an_engine_that_answers_and_computes_but_makes_no_progress_is_down(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "STALL_S", SHORT_S)
    incarnation = Incarnation(answers=True, cpu_step_s=60.0)
    incarnation.num_calls = 0
    run(engine, incarnation)
    assert [await engine.healthy() for _ in range(2)] == [True, True], "an idle engine"
    incarnation.num_calls = 2
    assert not await engine.healthy()
    assert "no progress with 2 calls" in incarnation.down.result()


async def test_an_engine_that_cannot_unload_an_adapter_is_down(engine: VllmEngine) -> None:
    """vLLM raises a plain Exception, and goes on with a slot that is not free."""
    run(engine, Incarnation(answers=True))
    adapter = LoadedAdapter("uid.agent@v1", 1, Path("/unused"))
    engine._residents.admit(adapter)
    with pytest.raises(EngineDown, match=r"cannot unload uid\.agent@v1: .*out of threads"):
        await engine.unload(adapter)
    assert not await engine.healthy()

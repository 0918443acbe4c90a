"""vLLM's processes: killed, hung, refused, and orphaned. The file comes last of the room's, since it ends the session's engine."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from marlaas_api.cpu_shares import CORE_NICENESS
from marlaas_api.errors import Permanent
from marlaas_worker.rollout import supervised_engine, vllm_engine, vllm_extension
from marlaas_worker.rollout.engine import EngineDown, Sampling
from marlaas_worker.rollout.supervised_engine import SupervisedEngine
from marlaas_worker.rollout.vllm_settings import environment

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)
LONG = Sampling(1.0, 120, 0)


def compiled_here() -> list[Path]:
    """What torch's compiler has left where the engine has it put things."""
    return [file for file in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*") if file.is_file()]


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_on_a_cpu_no_turn_waits_for_a_compiler(vllm, publish, slot_ids):
    adapter = publish(1).in_slot(slot_ids())
    await vllm.load(adapter)
    assert (await vllm.generate("first", adapter, PROMPT, LONG)).output_ids
    await vllm.unload(adapter)
    assert torch.cuda.is_available() or compiled_here() == []


WORKER = "import marlaas_worker.rollout.vllm_extension, sys, time; print('watching', flush=True); time.sleep(600)"
CORE = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {WORKER!r}]).returncode)"
OWNER = (
    "import os, subprocess, sys, time; from pathlib import Path;"
    "os.environ['MARLAAS_ENGINE_OWNER'] = f'{os.getpid()} ' + "
    "Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19];"
    f"core = subprocess.Popen([sys.executable, '-c', {CORE!r}]); time.sleep(600)"
)


def test_no_engine_process_outlives_an_owner_that_was_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "watching\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, left = psutil.wait_procs(below, timeout=30)
    assert left == []


def test_the_watch_is_for_vllms_processes_only(monkeypatch):
    assert vllm_extension.owner_token().split()[0] == str(os.getpid())
    monkeypatch.setenv(vllm_extension.OWNER, vllm_extension.owner_token())
    assert vllm_extension._open_core() is None


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_on_a_cpu_the_core_computes_with_less_priority_than_the_role(vllm):
    assert torch.cuda.is_available() or has_less_priority(vllm)


def has_less_priority(vllm):
    (core,) = vllm.processes
    return core.nice() == max(psutil.Process().nice(), CORE_NICENESS)


def executor_of(vllm):
    return vllm._incarnation.llm.vllm_config.parallel_config.distributed_executor_backend


def lacks(process: psutil.Process, variables: dict[str, str]) -> list[str]:
    """Which variables a process was started without, of those that are not this process's anyway."""
    found = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    return [
        f"{name}={value}" for name, value in variables.items() - os.environ.items() if f"{name}={value}" not in found
    ]


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_engine_fails_what_was_pending_and_serves_again_as_before_after_a_restart(
    vllm, publish, slot_ids
):
    published = [publish(1), publish(3)]
    adapters = [one.in_slot(slot_ids()) for one in published]
    for adapter in adapters:
        await vllm.load(adapter)
    digests, executor, counts = [await vllm.digest(adapter) for adapter in adapters], executor_of(vllm), vllm.counts
    before = vllm.processes
    for worker in before[1:]:
        worker.send_signal(signal.SIGSTOP)
    pending = [asyncio.create_task(vllm.generate(f"k{n}", adapters[0], PROMPT, LONG)) for n in range(3)]
    pending.append(asyncio.create_task(vllm.load(publish(2).in_slot(slot_ids()))))
    await asyncio.sleep(0)
    before[0].kill()
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(outcome, EngineDown) for outcome in outcomes)
    assert not await vllm.healthy()
    with pytest.raises(EngineDown, match="core process ended"):
        await vllm.generate("after", adapters[0], PROMPT, LONG)
    await vllm.restart()
    _, left = psutil.wait_procs(before, timeout=0)
    assert left == []
    assert (len(vllm.processes), executor_of(vllm)) == (len(before), executor)
    assert torch.cuda.is_available() or (len(before), executor, has_less_priority(vllm)) == (1, "uni", True)
    assert lacks(vllm.processes[0], environment(vllm._settings, forks=False)) == []
    again = [one.in_slot(slot_ids()) for one in published]
    for adapter in again:
        await vllm.load(adapter)
    assert [await vllm.digest(adapter) for adapter in again] == digests
    assert digests[0] == published[0].manifest.tensor_digests["float32"] != digests[1]
    assert (await vllm.generate("again", again[0], PROMPT, LONG)).output_ids
    assert vllm.counts.steps > counts.steps, "the totals go on"
    for adapter in again:
        await vllm.unload(adapter)


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_makes_progress_without_an_answer_is_healthy_and_counts_its_work(
    vllm, publish, slot_ids, monkeypatch
):
    adapter = publish(1).in_slot(slot_ids())
    await vllm.load(adapter)

    async def keep_busy(name: str) -> None:
        for number in itertools.count():
            await vllm.generate(f"{name}-{number}", adapter, PROMPT, LONG)

    before = vllm.counts
    busy = [asyncio.create_task(keep_busy(f"busy-{number}")) for number in range(40)]
    with monkeypatch.context() as patch:
        patch.setattr(vllm._incarnation.llm, "list_loras", asyncio.Event().wait)
        patch.setattr(vllm, "_answer_bound_s", 0.5)
        assert [await vllm.healthy() for _ in range(3)] == [True, True, True]
    after = vllm.counts
    steps = after.steps - before.steps
    assert 0 < steps < after.tokens - before.tokens
    assert torch.cuda.is_available() or after.layers - before.layers > steps, "a step moves the counters many times"
    assert (after.requests - before.requests >= 40, after.preemptions) == (True, 0)
    assert after.queued_steps - before.queued_steps > 0, "32 sequences fit"
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
    assert await vllm.healthy()
    await vllm.unload(adapter)


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_answers_but_schedules_nothing_is_restarted(vllm, publish, slot_ids, monkeypatch):
    published = publish(1)
    adapter = published.in_slot(slot_ids())
    monkeypatch.setattr(vllm_engine, "STALL_S", 1.0)
    monkeypatch.setattr(supervised_engine, "HEALTH_CHECK_S", 0.001)  # All the time, so that the core computes: answers.
    restarted, reasons = asyncio.Event(), []

    async def passes(engine) -> None:
        assert await engine.healthy()

    engine = SupervisedEngine(vllm, passes, reasons.append, restarted.set)
    await engine.start()
    await engine.load(adapter)
    await vllm._incarnation.llm.pause_generation(mode="keep", clear_cache=False)
    stuck = asyncio.create_task(engine.generate("stuck", adapter, PROMPT, LONG))
    supervising = asyncio.create_task(engine.supervise())
    with pytest.raises(EngineDown, match="answers, but has made no progress"):
        await stuck
    await restarted.wait()
    supervising.cancel()
    assert (len(reasons), engine.restarts) == (1, 1)
    again = published.in_slot(slot_ids())
    await engine.load(again)
    assert (await engine.generate("again", again, PROMPT, LONG)).output_ids
    await engine.unload(again)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_cannot_start_says_why_in_its_workers_words(small_model, pool, tmp_path):
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    greedy = pool.model_copy(update={"rollout": pool.rollout.model_copy(update={"kv_cache_bytes": "900Ti"})})
    engine = VllmEngine(small_model, greedy, frozenset(), tmp_path)
    with pytest.raises(Permanent, match=r"vLLM did not start: ValueError: .*memory"):
        await engine.start()
    assert engine.processes == ()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_a_start_that_is_cancelled_leaves_no_process(vllm, small_model, pool, tmp_path):
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = VllmEngine(small_model, pool, frozenset(), tmp_path)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert await vllm.healthy()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_a_hung_engine_is_given_up_and_can_be_ended(vllm, publish, slot_ids):
    adapter = publish(1).in_slot(slot_ids())
    await vllm.load(adapter)
    processes = vllm.processes
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    pending = asyncio.create_task(vllm.generate("h", adapter, PROMPT, LONG))
    assert not await vllm.healthy()
    with pytest.raises(EngineDown, match="has neither answered nor computed"):
        await pending
    await vllm.stop()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert left == []

"""vLLM's processes: killed, hung, refused, and orphaned. The file comes last of the room's, since it ends the session's engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.adapters import choose_dtype
from marlaas_worker.device_errors import OutOfMemory
from marlaas_worker.rollout import vllm_extension
from marlaas_worker.rollout.engine import EngineDown, LoadedAdapter, LoadFailed, Sampling, read_base_model
from marlaas_worker.rollout.vllm_engine import refusal
from marlaas_worker.rollout.vllm_settings import (
    adaptable_layers,
    choose_threads,
    engine_arguments,
    last_words,
    vllm_settings,
    write_log_config,
)

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)
LONG = Sampling(1.0, 120, 0)


def test_the_last_words_are_the_first_error_not_what_followed_from_it(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(
        "@@INFO 10:00 7 vllm.x: starting\n"
        "@@ERROR 10:01 9 vllm.worker: WorkerProc failed to start.\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in init\n    raise ValueError(msg)\n'
        "ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than requested\n"
        "@@ERROR 10:02 7 vllm.core: EngineCore failed to start.\nTraceback (most recent call last):\n"
        "Exception: WorkerProc initialization failed due to an exception in a background process.\n"
    )
    assert last_words(log) == "ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than requested"


def test_an_error_that_the_engine_survived_is_not_what_it_died_of(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("@@ERROR 10:00 7 vllm.core: Invocation of add_lora method failed\nValueError: rank 64\n")
    survived = log.stat().st_size
    with log.open("a") as more:
        more.write("@@ERROR 10:09 9 vllm.worker: WorkerProc failed.\nRuntimeError: out of blocks\n")
    assert last_words(log, survived) == "RuntimeError: out of blocks"


def test_a_log_without_errors_has_no_last_words(tmp_path):
    (tmp_path / "vllm.log").write_text("@@INFO 10:00 7 vllm.x: all is well\n")
    assert last_words(tmp_path / "vllm.log") == last_words(tmp_path / "none.log") == ""


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("Call to add_lora method failed: rank 64 is greater than max_lora_rank 16", LoadFailed),
        ("Call to add_lora method failed: CUDA error: an illegal memory access was encountered", EngineDown),
        ("Call to collective_rpc method failed: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling", EngineDown),
        ("Call to add_lora method failed: CUDA out of memory. Tried to allocate 32.00 MiB", OutOfMemory),
    ],
)
def test_a_version_is_refused_for_what_it_is_and_never_for_an_error_of_the_device(tmp_path, words, meaning):
    found = refusal(LoadedAdapter("policy@v1", 1, tmp_path), Exception(words))
    assert type(found) is meaning
    assert isinstance(found, Retryable) == (meaning is not LoadFailed)  # what is not, is never loaded again


def test_the_log_of_the_life_before_is_kept(small_model, pool, tmp_path):
    settings = vllm_settings(read_base_model(small_model), pool, tmp_path)
    write_log_config(settings)
    settings.log.write_text("died of this")
    config = json.loads(write_log_config(settings).read_text())
    assert settings.log.read_text() == ""
    assert (tmp_path / "vllm.before.log").read_text() == "died of this"
    assert config["handlers"]["file"]["filename"] == str(settings.log)


def test_settings_keep_a_spare_slot_and_the_models_own_window(small_model, pool, tmp_path):
    wide = pool.model_copy(update={"rollout": pool.rollout.model_copy(update={"max_model_len": 4096})})
    settings = vllm_settings(read_base_model(small_model), wide, tmp_path)
    arguments = engine_arguments(settings, tmp_path / "log.json")
    assert settings.limits.max_model_len == arguments["max_model_len"] == 256
    assert (settings.limits.slots, arguments["max_loras"], arguments["max_cpu_loras"]) == (6, 7, 14)


def test_adapters_may_have_every_linear_layer_but_head_and_embedding(small_model):
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adaptable_layers(small_model) == layers


def test_dtype_and_threads_are_chosen_by_the_machine_unless_the_pool_says():
    assert choose_dtype("auto", gpu=True) == "bfloat16"
    assert choose_dtype("auto", gpu=False) == "float32"
    assert choose_dtype("bfloat16", gpu=False) == "bfloat16"
    assert choose_threads(3, 8) == 3


def test_a_folder_without_a_model_and_tensor_parallelism_are_refused_with_what_to_do(pool, small_model, tmp_path):
    with pytest.raises(Permanent, match=r"no base model in .*marlaas models list"):
        read_base_model(tmp_path)
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(Permanent, match="not safetensors files"):
        read_base_model(tmp_path)
    with pytest.raises(Permanent, match="tensorParallelSize"):
        vllm_settings(read_base_model(small_model), pool.model_copy(update={"tensor_parallel_size": 2}), tmp_path)


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
async def test_a_killed_engine_fails_what_was_pending_and_serves_again_after_a_restart(vllm, publish, slot_ids):
    published = publish(1)
    adapter = published.in_slot(slot_ids())
    await vllm.load(adapter)
    before = vllm.processes
    for worker in before[1:]:
        worker.send_signal(signal.SIGSTOP)
    pending = [asyncio.create_task(vllm.generate(f"k{n}", adapter, PROMPT, LONG)) for n in range(3)]
    pending.append(asyncio.create_task(vllm.load(publish(2).in_slot(slot_ids()))))
    await asyncio.sleep(0)
    before[0].kill()
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(outcome, EngineDown) for outcome in outcomes)
    assert not await vllm.healthy()
    with pytest.raises(EngineDown, match="core process ended"):
        await vllm.generate("after", adapter, PROMPT, LONG)
    await vllm.restart()
    _, left = psutil.wait_procs(before, timeout=0)
    assert left == []
    again = published.in_slot(slot_ids())
    await vllm.load(again)
    assert await vllm.digest(again) == published.manifest.tensor_digests["float32"]
    assert (await vllm.generate("again", again, PROMPT, LONG)).output_ids
    await vllm.unload(again)


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

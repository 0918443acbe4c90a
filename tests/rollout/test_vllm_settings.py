"""vLLM's settings, its log, and the meaning of its errors, without vLLM."""

import json

import pytest
from safetensors.torch import load_file

from marlaas_api.errors import InvalidInput, Permanent, Retryable
from marlaas_worker.adapters import choose_dtype
from marlaas_worker.device_errors import OutOfMemory
from marlaas_worker.rollout import vllm_settings as vllm_settings_module
from marlaas_worker.rollout.engine import EngineDown, LoadedAdapter, LoadFailed, read_base_model
from marlaas_worker.rollout.engine_progress import CPU_PRODUCTS_PER_S, GPU_PRODUCTS_PER_S, MIN_BUSY_BOUND_S
from marlaas_worker.rollout.vllm_engine import refusal
from marlaas_worker.rollout.vllm_settings import (
    adaptable_layers,
    choose_threads,
    engine_arguments,
    environment,
    first_error,
    longest_silence_s,
    start_failure,
    vllm_settings,
    write_log_config,
)


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
    assert first_error(log) == "ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than requested"


@pytest.mark.parametrize(
    ("words", "is_lasting"),
    [
        ("ValueError: 'aimv2' is already used by a Transformers config", True),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", True),
        ("ValueError: Free memory on device (1.0/2.0 GiB) on startup is less than desired", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("RuntimeError: Address already in use", False),
    ],
)
def test_a_start_that_would_fail_again_is_tried_once(tmp_path, words, is_lasting):
    assert isinstance(start_failure(words, tmp_path), InvalidInput) == is_lasting


def test_an_error_that_the_engine_survived_is_not_what_it_died_of(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("@@ERROR 10:00 7 vllm.core: Invocation of add_lora method failed\nValueError: rank 64\n")
    survived = log.stat().st_size
    with log.open("a") as more:
        more.write("@@ERROR 10:09 9 vllm.worker: WorkerProc failed.\nRuntimeError: out of blocks\n")
    assert first_error(log, survived) == "RuntimeError: out of blocks"


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
    chosen = [choose_dtype("auto", gpu=True), choose_dtype("auto", gpu=False), choose_dtype("bfloat16", gpu=False)]
    assert chosen == ["bfloat16", "float32", "bfloat16"]
    assert (choose_threads(3, 8), choose_threads(None, 8), choose_threads(None, 1)) == (3, 7, 1)


def test_a_folder_without_a_model_and_tensor_parallelism_are_refused_with_what_to_do(pool, small_model, tmp_path):
    with pytest.raises(Permanent, match=r"no base model in .*marlaas models list"):
        read_base_model(tmp_path)
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(Permanent, match="not safetensors files"):
        read_base_model(tmp_path)
    with pytest.raises(Permanent, match="tensorParallelSize"):
        vllm_settings(read_base_model(small_model), pool.model_copy(update={"tensor_parallel_size": 2}), tmp_path)


def test_a_step_may_be_silent_for_longer_if_the_model_is_large(small_model, pool, tmp_path, monkeypatch):
    settings = vllm_settings(read_base_model(small_model), pool, tmp_path)
    assert longest_silence_s(settings, 512) == MIN_BUSY_BOUND_S
    largest, total = 128 * 64, sum(weight.numel() for weight in load_file(small_model / "model.safetensors").values())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert longest_silence_s(settings, 10**9) == 10**9 * largest / CPU_PRODUCTS_PER_S
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert longest_silence_s(settings, 10**12) == 10**12 * total / GPU_PRODUCTS_PER_S


def test_compiled_code_is_kept_beside_its_source_or_else_in_the_engines_own_folder(
    small_model, pool, tmp_path, monkeypatch
):
    settings = vllm_settings(read_base_model(small_model), pool, tmp_path)
    monkeypatch.setattr(vllm_settings_module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vllm_settings_module, "_OWN_FOLDER", tmp_path)
    assert "NUMBA_CACHE_DIR" not in environment(settings, forks=False)
    monkeypatch.setattr(vllm_settings_module, "_OWN_FOLDER", tmp_path / "missing")
    assert environment(settings, forks=False)["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")

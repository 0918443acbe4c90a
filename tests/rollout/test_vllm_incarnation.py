"""vLLM's processes: killed, hung, refused and orphaned. The file comes last of the folder's real engine, since it ends it."""

import asyncio
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.tables import data

from marlaas_api.background import background
from marlaas_api.cpu_shares import CORE_NICENESS
from marlaas_api.errors import Permanent
from marlaas_worker.rollout.engine import EngineDown, Sampling
from marlaas_worker.rollout.supervised_engine import SupervisedEngine
from marlaas_worker.rollout.vllm_settings import environment

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)
LONG = Sampling(1.0, 120, 0)
PROGRAMS = [data(__file__, f"engine_{name}") for name in ("owner", "core", "worker")]


@pytest.mark.processes
@pytest.mark.slow
def test_a_new_engine_process_has_our_kernels_and_does_not_outlive_an_owner_that_was_killed():
    owner = subprocess.Popen([sys.executable, "-c", *PROGRAMS], stdout=subprocess.PIPE, text=True)
    assert "cpu_c" in owner.stdout.readline().split()
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, left = psutil.wait_procs(below, timeout=60)
    assert left == []


def on_a_cpu(vllm):
    """Number of processes, executor, and whether the core computes with less priority than the role."""
    executor = vllm._incarnation.llm.vllm_config.parallel_config.distributed_executor_backend
    has_less_priority = vllm.processes[0].nice() == max(psutil.Process().nice(), CORE_NICENESS)
    return len(vllm.processes), executor, has_less_priority


def lacks(process, variables):
    """Which variables a process was started without, of those that are not this process's anyway."""
    found = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    ours = {f"{name}={value}" for name, value in variables.items() - os.environ.items()}
    return sorted(ours.difference(found))


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_is_healthy_while_the_counters_of_its_work_move(vllm, publish, slot_ids, monkeypatch):
    adapter = publish(1).in_slot(slot_ids())
    await vllm.load(adapter)
    before = vllm.counts

    async def keep_busy(name):
        for number in itertools.count():
            await vllm.generate(f"{name}-{number}", adapter, PROMPT, LONG)

    def has_batched():
        """Several requests have shared a step since the start, and others wait for theirs."""
        now = vllm.counts
        steps, tokens = now.steps - before.steps, now.tokens - before.tokens
        return 0 < steps < tokens and now.queued_steps > before.queued_steps

    async def answers_too_late():
        while not has_batched():  # noqa: ASYNC110 - memory that another process writes
            await asyncio.sleep(0.01)
        raise TimeoutError

    busy = [asyncio.create_task(keep_busy(f"busy-{number}")) for number in range(40)]
    with monkeypatch.context() as patch:
        patch.setattr(vllm._incarnation.llm, "list_loras", answers_too_late)
        assert await vllm.healthy()
    after = vllm.counts
    steps = after.steps - before.steps
    assert torch.cuda.is_available() or after.layers - before.layers > steps, "a step moves the counters many times"
    assert (after.requests - before.requests >= 40, after.preemptions) == (True, 0)
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
    await vllm._incarnation.llm.pause_generation(mode="keep", clear_cache=False)
    stuck = asyncio.create_task(vllm.generate("stuck", adapter, PROMPT, LONG))
    assert await vllm.healthy(), "it answers"
    seen, first = vllm.counts.work, vllm._incarnation.standstill(True)
    assert await vllm.healthy()
    assert (vllm.counts.work, vllm._incarnation.standstill(True).still_s > first.still_s) == (seen, True)
    await vllm._incarnation.llm.resume_generation()
    assert (await stuck).output_ids
    await vllm.unload(adapter)
    compiled = [files for _, _, files in os.walk(os.environ["TORCHINDUCTOR_CACHE_DIR"]) if files]
    assert torch.cuda.is_available() or compiled == [], "no turn waits for a compiler"


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_cannot_start_says_why_and_leaves_no_process(vllm, small_model, pool, tmp_path):
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    greedy = pool.model_copy(update={"rollout": pool.rollout.model_copy(update={"kv_cache_bytes": "900Ti"})})
    engine = VllmEngine(small_model, greedy, frozenset(), tmp_path, may_fork=True)
    with pytest.raises(Permanent, match=r"vLLM did not start: ValueError: .*memory"):
        await engine.start()
    assert engine.processes == ()
    resource_tracker.ensure_running()  # Python starts this process with the first one that it spawns, and keeps it.
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    starting = asyncio.create_task(VllmEngine(small_model, pool, frozenset(), tmp_path).start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert await vllm.healthy()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_engine_serves_again_and_one_that_hangs_is_given_up(vllm, publish, slot_ids, monkeypatch):
    published = [publish(1), publish(3)]
    failures, restarted = list[str](), asyncio.Event()

    async def passes(engine):
        assert await engine.healthy()

    async def load_both():
        adapters = [one.in_slot(slot_ids()) for one in published]
        for adapter in adapters:
            await engine.load(adapter)
        return adapters

    engine = SupervisedEngine(vllm, passes, failures.append, restarted.set)
    await engine.start()
    adapters, first = await load_both(), vllm.processes
    digests, kind, counts = [await vllm.digest(adapter) for adapter in adapters], on_a_cpu(vllm), vllm.counts
    assert torch.cuda.is_available() or kind == (1, "uni", True)
    for worker in first[1:]:
        worker.send_signal(signal.SIGSTOP)
    pending = [asyncio.create_task(engine.generate(f"k{n}", adapters[0], PROMPT, LONG)) for n in range(3)]
    pending.append(asyncio.create_task(engine.load(publish(2).in_slot(slot_ids()))))
    await asyncio.sleep(0)
    first[0].kill()
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(outcome, EngineDown) for outcome in outcomes)
    assert not await vllm.healthy()
    with pytest.raises(EngineDown, match="core process ended"):
        await vllm.generate("after", adapters[0], PROMPT, LONG)
    async with background(engine.supervise()):  # which ends the wait if no restart succeeds
        await restarted.wait()
    assert (len(failures), engine.restarts, engine.up) == (1, 1, True)
    _, left = psutil.wait_procs(first, timeout=0)
    assert left == []
    assert on_a_cpu(vllm) == kind
    assert lacks(vllm.processes[0], environment(vllm._settings, forks=False)) == []
    adapters, second = await load_both(), vllm.processes
    assert [await vllm.digest(adapter) for adapter in adapters] == digests
    assert digests[0] == published[0].manifest.tensor_digests["float32"] != digests[1]
    assert (await engine.generate("again", adapters[0], PROMPT, LONG)).output_ids
    assert vllm.counts.steps > counts.steps, "the totals go on"

    for process in second:
        process.send_signal(signal.SIGSTOP)
        while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    hanging = asyncio.create_task(vllm.generate("hangs", adapters[0], PROMPT, LONG))
    monkeypatch.setattr(vllm, "_answer_bound_s", 0.1)
    assert not await vllm.healthy()
    with pytest.raises(EngineDown, match="has neither answered nor computed"):
        await hanging
    await vllm.stop()
    _, left = psutil.wait_procs(second, timeout=60)
    assert left == []


ROLE = data(__file__, "role")


@pytest.mark.processes
@pytest.mark.slow
def test_a_forked_core_keeps_no_connection_no_wakeup_and_no_threads_of_the_role_and_ends_with_it():
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", ROLE, f"127.0.0.1:{listener.getsockname()[1]}"]
    with listener, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as role:
        facts = sorted((role.stdout.readline().split() for _ in range(3)), key=lambda line: line[1])
        (stopped, *of_stopped), (orphan, *of_orphan), (other, *of_other) = facts
        assert of_stopped == of_orphan == ["1", "True", "True", "False"]
        assert of_other == ["2", "False", "False", "True"]  # a fork that is no core is left as it is
        for core, end in ((stopped, partial(os.kill, int(stopped), signal.SIGTERM)), (orphan, role.kill)):
            ended = os.pidfd_open(int(core))
            end()
            assert select.select([ended], [], [], 60.0)[0]
            os.close(ended)
            if core == stopped:
                role.stdin.write("\n")
                role.stdin.flush()
                assert role.stdout.readline() == "not woken\n"
        os.kill(int(other), signal.SIGKILL)

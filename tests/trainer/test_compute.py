"""The compute thread: fair, one at a time, never left half-way, and with the same bits on two threads."""

import asyncio
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from marlaas_worker.trainer.compute import Compute, compute_reproducibly
from marlaas_worker.trainer.compute_queue import CREDIT_S, ComputeAccount, ComputeQueue


@pytest.fixture
def compute():
    made = Compute(1)
    yield made
    made.close()


async def test_work_that_is_cancelled_as_its_turn_is_granted_lets_the_next_go_on():
    class Cancelling(Compute):
        victims: tuple[asyncio.Task[None], ...] = ()

        def _grant(self):
            super()._grant()
            for victim in self.victims:
                victim.cancel()

    compute, gate, done = Cancelling(1), threading.Event(), list[int]()
    first = asyncio.create_task(compute.run(gate.wait))
    await asyncio.sleep(0)
    victim = asyncio.create_task(compute.run(lambda: done.append(1)))
    await asyncio.sleep(0)
    compute.victims = (victim,)
    gate.set()
    await asyncio.gather(first, victim, return_exceptions=True)
    assert await compute.run(lambda: 7) == 7
    assert (victim.cancelled(), done) == (True, [])
    compute.close()


async def test_work_that_is_cancelled_however_often_is_over_before_the_next_begins(compute):
    running, go_on, over = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work():
        loop.call_soon_threadsafe(running.set)
        go_on.wait()
        over.set()

    task = asyncio.create_task(compute.run(work))
    await running.wait()
    task.cancel()
    following = asyncio.create_task(compute.run(over.is_set))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
    go_on.set()
    assert await following
    assert task.cancelled()


STEP_S, QUANTUM_S = 0.1, 0.25


def agent(name, tenant="", job=""):
    return ComputeAccount(tenant or name, job or name, name)


def order(queue, seconds=STEP_S):
    served = []
    while (ticket := queue.next()) is not None:
        served.append(ticket.item[2])
        queue.settle(ticket, seconds)
    return served


def serve(accounts, duration_s, queue, seed=0):
    """Seconds by tenant when every agent always has more work, whose time differs from its estimate."""
    draw, served, now = random.Random(seed), dict.fromkeys((one.tenant for one in accounts), 0.0), 0.0
    for account in accounts:
        queue.hold(account, True)
        queue.push(account, "", 100)
    while now < duration_s:
        ticket = queue.next()
        assert ticket is not None, "there is work, and the thread is idle"
        account, seconds = ticket.item[0], draw.uniform(0.01, STEP_S)
        queue.settle(ticket, seconds)
        queue.push(account, "", 100)
        served[account.tenant] += seconds
        now += seconds
    order(queue, 0.0)
    for account in accounts:
        queue.hold(account, False)
    return served


@pytest.mark.parametrize(
    ("quantum_s", "expected"), [(QUANTUM_S, "a0 a1 a2 b0 b1 b2 a3 a4 b3 b4"), (0.0, "a0 b0 a1 b1 a2 b2 a3 b3 a4 b4")]
)
def test_the_agent_that_computed_last_keeps_the_turn_for_a_quantum(quantum_s, expected):
    queue: ComputeQueue[str] = ComputeQueue(quantum_s)
    for number in range(5):
        for name in ("a", "b"):
            queue.push(agent(name), f"{name}{number}")
    dropped = queue.push(agent("c"), "dropped")
    queue.withdraw(dropped)
    assert queue.usage("c") == 0.0
    assert " ".join(order(queue)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_two_tenants_get_seconds_by_weight_within_the_bound(seed):
    queue: ComputeQueue[str] = ComputeQueue(QUANTUM_S)
    queue.set_weights({"light": 1.0, "heavy": 3.0})
    served = serve([agent("one", "light"), agent("two", "heavy")], 60.0, queue, seed)
    largest = QUANTUM_S + 2 * STEP_S  # a quantum and the micro-batch that exceeds it, and the error of one estimate
    assert abs(served["light"] / 1.0 - served["heavy"] / 3.0) <= largest * (1.0 + 1 / 3.0)


def test_thirty_jobs_gain_a_tenant_nothing_over_one():
    many = [agent(f"many-{number}", "many") for number in range(30)]
    served = serve([*many, agent("one", "few")], 60.0, ComputeQueue(QUANTUM_S))
    assert abs(served["many"] - served["few"]) <= 2 * (QUANTUM_S + 2 * STEP_S)


def test_an_agent_with_held_groups_keeps_its_credit_and_one_without_does_not():
    for holds in (True, False):
        queue: ComputeQueue[str] = ComputeQueue(0.0)
        waiting, busy = agent("waiting"), agent("busy")
        if holds:
            queue.hold(waiting, True)
            queue.hold(waiting, True)
        serve([busy], 5.0, queue)
        for number in range(3):
            queue.push(waiting, f"w{number}")
            queue.push(busy, f"b{number}")
        served = order(queue)
        assert (served[:3] == ["w0", "w1", "w2"]) == holds
        assert sorted(served) == ["b0", "b1", "b2", "w0", "w1", "w2"]


def test_an_agent_whose_groups_hang_has_the_thread_for_a_bounded_time_afterwards():
    queue: ComputeQueue[str] = ComputeQueue(0.0)
    hangs, busy = agent("hangs"), agent("busy")
    queue.hold(hangs, True)
    serve([busy], 10 * CREDIT_S, queue)
    for _ in range(2000):
        queue.push(busy, "busy")
        queue.push(hangs, "hangs")
    served = order(queue)
    assert CREDIT_S / 2 - 1 <= STEP_S * served.index("busy") <= CREDIT_S / 2 + 1, "two tenants have credit"


def test_an_agent_with_much_work_does_not_delay_its_siblings():
    queue: ComputeQueue[str] = ComputeQueue(0.0)
    for number in range(10):
        queue.push(agent("floods", "tenant", "job"), f"f{number}")
    queue.push(agent("calm", "tenant", "job"), "calm")
    assert order(queue).index("calm") == 1


def test_on_a_gpu_products_are_as_precise_as_the_engines(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        for precision in ("high", "highest"):
            monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", precision)
            compute_reproducibly(torch.device("cuda"))
            assert torch.get_float32_matmul_precision() == precision
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_with_two_threads_compute_the_same_gradient_bytes_while_they_fight_for_the_processor(tiny_model):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    own |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.trainer.gradient_digest", str(tiny_model), "2"]
    processes = [subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].split() for process in processes]
    assert all(words == said[0] for words in said)
    assert said[0][1:] == ["2", "AUTO,STRICT"]

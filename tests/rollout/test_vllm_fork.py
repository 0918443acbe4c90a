"""A forked core process: what it keeps of the role that it was forked from, and what it does not."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from marlaas_api.messages import PoolSpec
from marlaas_worker.rollout.engine import read_base_model
from marlaas_worker.rollout.vllm_engine import VllmEngine
from marlaas_worker.rollout.vllm_fork import drop_connections
from marlaas_worker.rollout.vllm_settings import environment, vllm_settings

ROLE = """
import os, signal, socket, sys, threading, time
from marlaas_worker.rollout import vllm_extension, vllm_fork
import torch
import torch._dynamo

bus = socket.create_connection(sys.argv[1].split(":"))
torch.set_num_threads(2)
ours, wake = socket.socketpair()
wake.setblocking(False)
signal.set_wakeup_fd(wake.fileno())
signal.signal(signal.SIGTERM, lambda number, frame: None)
os.environ[vllm_extension.OWNER] = vllm_extension.owner_token()

def core():
    try:
        bus.getpeername()
        connected = True
    except OSError:
        connected = False
    watched = any(thread.name == "owner-watch" for thread in threading.enumerate())
    facts = os.getpid(), torch.get_num_threads(), torch._dynamo.config.disable, watched, connected
    os.write(1, (" ".join(map(str, facts)) + "\\n").encode())  # one write: two processes share the pipe
    time.sleep(600)

for is_core in (True, True, False):
    if is_core:
        with vllm_fork.forking(1):
            pid = os.fork()
    else:
        pid = os.fork()
    if pid == 0:
        core()
sys.stdin.readline()
ours.setblocking(False)
try:
    print("woken", ours.recv(1), flush=True)
except BlockingIOError:
    print("not woken", flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_forked_core_keeps_no_connection_no_wakeup_and_no_threads_of_the_role_and_ends_with_it() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", ROLE, f"127.0.0.1:{listener.getsockname()[1]}"]
    with listener, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdin is not None
        assert role.stdout is not None
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


def test_other_descriptors_than_network_sockets_stay() -> None:
    pid = os.fork()
    if pid == 0:
        one, two = socket.socketpair()
        network = socket.socket()
        number = network.fileno()
        drop_connections()
        one.sendall(b"x")
        kept = two.recv(1) == b"x"
        replaced = Path(f"/proc/self/fd/{number}").readlink() == Path(os.devnull)
        os._exit(0 if kept and replaced else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_only_the_first_core_is_forked_and_none_beside_a_gpu(
    small_model: Path, pool: PoolSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = vllm_settings(read_base_model(small_model), pool, tmp_path)
    assert environment(settings, forks=True)["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert environment(settings, forks=False)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    started: list[bool] = []

    async def start(_: object, forks: bool) -> None:
        started.append(forks)

    monkeypatch.setattr("marlaas_worker.rollout.vllm_engine.start_incarnation", start)
    for has_gpu, may_fork in ((False, True), (False, False), (True, True)):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        engine = VllmEngine(small_model, pool, frozenset({1}), tmp_path, may_fork=may_fork)
        asyncio.run(engine.start())
        asyncio.run(engine.start())
    assert started == [True, False, False, False, False, False]

"""A forked core process: what it keeps of the role that it was forked from, and what it does not."""

import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial

import pytest

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
def test_a_forked_core_keeps_no_connection_no_wakeup_and_no_threads_of_the_role_and_ends_with_it():
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

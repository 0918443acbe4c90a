"""Forks vLLM's core process from the role, so that vllm is imported once and not twice in a row.

The two imports were nine tenths of an engine's start on a CPU. Only the first core of a role is forked: later the role has threads
of other libraries, whose locks and OpenMP teams a fork would copy in any state. CUDA does not survive a fork, so on a GPU the core is
forked only if the role has not initialized CUDA. So that torch can look for GPUs without CUDA, it is told to ask NVML, the driver's
management library; vLLM does the same. This module removes from the forked process all that belongs to the role.
"""

import importlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from marlaas_worker.rollout import vllm_extension

_LOOKS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
os.environ.setdefault(_LOOKS_BY_NVML, "1")  # before the role asks for a GPU; vLLM sets it at import, which is later
_NETWORK = (socket.AF_INET, socket.AF_INET6)
_threads: int | None = None
"""Compute threads of the process that is about to be forked; None: no core is being forked."""


def obstacle() -> str:
    """Return why a core process that uses a GPU cannot be forked from this process; empty if it can."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialized in the role"
    if os.environ.get(_LOOKS_BY_NVML) != "1":
        return f"{_LOOKS_BY_NVML} is not 1, so torch has asked CUDA for GPUs in the role"
    cannot_count = torch.cuda._device_count_nvml() < 0  # as of a part of a card (MIG); torch then asks CUDA
    return (
        "the driver's management library cannot count the GPUs, so torch has asked CUDA in the role"
        if cannot_count
        else ""
    )


@contextmanager
def forking(threads: int) -> Iterator[None]:
    """Make every process that is forked in this context a core process (`_leave_role`). threads: number of its compute threads."""
    global _threads
    before, _threads = _threads, threads
    try:
        yield
    finally:
        _threads = before


def _leave_role() -> None:
    """Remove the role's signal handlers and connections from a forked core process, and apply vLLM's settings to it.

    Runs in every forked process, and does nothing in one that is not a core process.
    """
    if _threads is None:
        return
    # Otherwise a signal to this process would wake the role's event loop, which would take the signal for its own.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    drop_connections()
    # A spawned process reads these settings from its environment. A forked one has inherited the role's.
    torch.set_num_threads(_threads)
    importlib.import_module("torch._dynamo").config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    # A spawned process is prepared when it imports this module. The role imported it without OWNER, so without effect.
    vllm_extension.prepare_process()


os.register_at_fork(after_in_child=_leave_role)


def drop_connections() -> None:
    """Replace this process's network sockets by /dev/null: its connections to bus and store, and its health server, are the role's.

    The descriptors are not closed: the inherited objects will close them by number, which could then be the number of another file.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this iteration is closed already
            if _is_network(int(name.name)):
                os.dup2(null, int(name.name), inheritable=False)
    os.close(null)


def _is_network(descriptor: int) -> bool:
    """Return whether a descriptor is an internet socket. Raises OSError if it is closed."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family in _NETWORK

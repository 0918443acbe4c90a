"""Setup of a worker's process: settings of MKL, torch and oneDNN, a home folder, a user name, caches, and the garbage
collector. Imports no torch.

MKL reads its settings once. By default it chooses the order of summation by the alignment of its operands, and the number of threads as it
goes (Intel, "Obtaining Numerically Reproducible Results"). An adapter read from a file lies anywhere in memory, so the same job could get
other last bits in another process.

A container with a read-only root has no writable home, and its uid no passwd entry. Libraries keep caches below the home folder (vLLM, triton,
matplotlib, the hub's client), and torch's compiler asks for the user's name. A writable home and an existing name are left unchanged.
"""

import asyncio
import contextlib
import functools
import gc
import getpass
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

SETTINGS = {"MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}


def ask_for_the_same_bits() -> None:
    """Set MKL's environment variables (`SETTINGS`) for this process and its children; keep values that the user has set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


MEMORY_SETTINGS = {
    "rollout": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"},
    "trainer": {"THP_MEM_ALLOC_ENABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
}
"""Environment variables that save memory, by role; the libraries read them once.

Rollout: oneDNN caches a kernel for each shape of a weight and number of rows. Its default, 1,024 kernels, took 150 MiB in vLLM's core
(docs/reference/measurements.md). Trainer: without torch's huge pages, glibc's heap takes half as much again as the activations
(`bench/memory.py`). Inductor would start a process for each core, and the trainer's memory plan does not include them.
"""


def set_memory_variables(role: str) -> None:
    """Set the variables in `MEMORY_SETTINGS` for this process and its children; keep values that the user has set."""
    for name, value in MEMORY_SETTINGS.get(role, {}).items():
        os.environ.setdefault(name, value)


MAX_UNCOLLECTED_S = 60.0
"""Longest time in seconds without collections of garbage, from the first turn of the event loop. A role may wait for hours until it is ready."""


@contextlib.asynccontextmanager
async def collect_once_ready(
    is_ready: Callable[[], bool], check_s: float = 1.0, longest_s: float = MAX_UNCOLLECTED_S
) -> AsyncIterator[None]:
    """Collect no garbage while the role starts; once it is ready, exclude all objects of its start from later collections.

    The imports of torch, transformers and vllm make 400,000 to 700,000 objects. Collections during them take a tenth to a fifth of
    the start's CPU time, and a full collection after them stops the event loop for 0.2 to 0.4 s.

    Args:
        is_ready: whether the role is ready.
        check_s: seconds between two calls of `is_ready`.
        longest_s: seconds after which garbage is collected although the role is not ready.
    """
    gc.disable()
    _collect_in_forked_processes()
    freezing = asyncio.create_task(_freeze_heap(is_ready, check_s, longest_s))
    try:
        yield
    finally:
        freezing.cancel()
        gc.enable()


async def _freeze_heap(is_ready: Callable[[], bool], check_s: float, longest_s: float) -> None:
    late = asyncio.get_running_loop().call_later(longest_s, gc.enable)
    try:
        while not is_ready():  # noqa: ASYNC110 (roles report readiness by a function)
            await asyncio.sleep(check_s)
        gc.collect()
        gc.freeze()
    finally:
        late.cancel()
        gc.enable()


@functools.cache
def _collect_in_forked_processes() -> None:
    """Let processes that are forked from now on, such as vLLM's core, collect their own garbage, whatever this process does."""
    os.register_at_fork(after_in_child=_collect_own_garbage)


def _collect_own_garbage() -> None:
    gc.freeze()  # A collection of the inherited objects would copy the memory that this process shares with its parent.
    gc.enable()


USER = "marlaas"


def make_home(scratch: Path) -> None:
    """Give this process a writable home folder and a user name where it has none, by the variables of `home_variables`."""
    os.environ.update(home_variables(scratch))


def home_variables(scratch: Path) -> dict[str, str]:
    """Return environment variables that give this process a writable home folder and a user name; empty if it has both.

    HOME is `<scratch>/home`, which this function creates; it is set if the process cannot write to its present home folder. USER and
    LOGNAME are set if the process's user has no name.
    """
    added: dict[str, str] = {}
    if not _has_home():
        home = scratch / "home"
        home.mkdir(parents=True, exist_ok=True)
        added["HOME"] = str(home)
    return added if _has_name() else added | dict.fromkeys(("USER", "LOGNAME"), USER)


def _has_home() -> bool:
    try:
        return _can_write(Path.home())
    except RuntimeError:
        return False


def _has_name() -> bool:
    try:
        return bool(getpass.getuser())
    except (KeyError, OSError):
        return False


CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Environment variables with the folders in which libraries keep what they compile. In a cluster they lie on the models' volume."""


def drop_read_only_caches() -> None:
    """Unset the variables in `CACHES` whose folder cannot be created or written, as on a read-only volume: torch would fail at its import.

    The libraries then use their default folders, below the home folder and the folder of temporary files.
    """
    for name in CACHES:
        if (folder := os.environ.get(name)) is None:
            continue
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
        if not _can_write(Path(folder)):
            del os.environ[name]


def _can_write(folder: Path) -> bool:
    """Return whether a file can be written in the folder.

    Permissions are not enough: root passes every permission check but cannot write on a read-only file system.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False

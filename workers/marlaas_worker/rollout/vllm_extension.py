"""Code that runs in vLLM's worker processes: adapter loads that return the slot's digest, CPU kernels, and exit with the owner process.

vLLM mixes `AdapterSlots` into its worker class (`worker_extension_cls`) and calls it through `collective_rpc`. It
reads private attributes of vLLM 0.32 (`lora/model_manager.py`); `tests/rollout/test_engine_contract.py` fails
if they move.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from marlaas_api.cpu_shares import CORE_NICENESS
from marlaas_worker.adapters import Kind, slot_digest

OWNER = "MARLAAS_ENGINE_OWNER"
"""Environment variable of vLLM's processes: identity of their owner, the process of the rollout role (`owner_token`)."""


class AdapterSlots:
    """Adds to vLLM's worker class the calls that load an adapter and read a slot's digest. Its names must not collide with vLLM's."""

    model_runner: Any

    def marlaas_load(self, name: str, slot_id: int, folder: str, rank: int) -> str:
        """Load an adapter, and return the digest of its slot. After an error the slot is free.

        Args:
            name: the adapter's name in the engine.
            slot_id: the number that identifies the adapter in vLLM (`lora_int_id`).
            folder: of the adapter's files.
            rank: of the adapter.

        Raises:
            LookupError, ValueError: as `marlaas_slot_digest`; also vLLM's own errors.
        """
        from vllm.lora.request import LoRARequest

        try:
            self.model_runner.add_lora(LoRARequest(lora_name=name, lora_int_id=slot_id, lora_path=folder))
            return self.marlaas_slot_digest(slot_id, rank)
        except Exception:
            # vLLM takes the slot before it copies the tensors, and keeps it if the device has no memory for them.
            with contextlib.suppress(Exception):  # The first error says more, also whether the device is lost.
                self.model_runner.remove_lora(slot_id)
            raise

    def marlaas_slot_digest(self, slot_id: int, rank: int) -> str:
        """Return the digest (`adapters.slot_digest`) of the slot that holds an adapter.

        Args:
            slot_id: the number that identifies the adapter in vLLM (`lora_int_id`).
            rank: of the adapter.

        Raises:
            LookupError: no slot holds the adapter.
            ValueError: the slot has nonzero values beyond the adapter's rank.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        if slot_id not in manager.lora_index_to_id:
            raise LookupError(f"no slot holds adapter {slot_id}")
        return slot_digest(_held(manager, manager.lora_index_to_id.index(slot_id), rank))


def _held(manager: Any, index: int, rank: int) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Yield (module, kind, tensor) of a slot, with packed layers (qkv_proj) split into their parts (q, k, v). Raises as `marlaas_slot_digest`.

    Args:
        manager: vLLM's manager of adapters.
        index: position of the slot in the layers' tensors.
        rank: of the adapter in the slot; tensors are cut to it.
    """
    for name, layer in manager.modules.items():
        if getattr(layer, "tp_size", 1) != 1:
            raise ValueError("slots cannot be read back under tensor parallelism")
        parts = manager.packed_modules.get(name, [name])
        matrices: tuple[tuple[Kind, Any], ...] = (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked))
        for kind, stacked in matrices:
            slices = [stacked] if isinstance(stacked, torch.Tensor) else stacked
            for part, tensor in zip(parts, slices, strict=True):
                yield part, kind, _within_rank(part, kind, tensor[index], rank)


def _within_rank(module: str, kind: Kind, held: torch.Tensor, rank: int) -> torch.Tensor:
    if held.dim() != 3:  # The table of an embedding, which our adapters do not have.
        if bool(held.any()):
            raise ValueError(f"{module}: adapted embeddings are not supported")
        return held
    inside, beyond = (held[0, :rank], held[0, rank:]) if kind == "A" else (held[0, :, :rank], held[0, :, rank:])
    if bool(beyond.any()):
        raise ValueError(f"{module}: lora_{kind} has nonzero values beyond rank {rank}")
    return inside


def owner_token() -> str:
    """Return this process's identity, as the value of OWNER: pid and start time, because pids are reused."""
    return f"{os.getpid()} {_started(os.getpid())}"


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _open_owner() -> int:
    """Return a file descriptor that becomes readable when the owner exits. Raises OSError if it has exited."""
    pid, started = os.environ[OWNER].split()
    descriptor = os.pidfd_open(int(pid))
    if _started(int(pid)) != started:
        raise ProcessLookupError(f"process {pid} is not the owner: its start time differs")
    return descriptor


def _die_with_owner(core: int | None) -> None:
    """Wait until the owner exits, then kill vLLM's engine core and this process.

    The core is killed too, because it would otherwise wait for requests for ever. core: its pidfd; None: this process is the core, or the
    core has exited.
    """
    with contextlib.suppress(OSError):
        select.select([_open_owner()], [], [])
    if core is not None:
        signal.pidfd_send_signal(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _owner_pid() -> int:
    return int(os.environ[OWNER].split()[0])


def _watch_owner() -> None:
    if os.getpid() == _owner_pid():
        return
    threading.Thread(target=_die_with_owner, args=(_open_core(),), name="owner-watch", daemon=True).start()


def _open_core() -> int | None:
    """Return a file descriptor of the core process, our parent; None if this process is the core, or the core has exited."""
    with contextlib.suppress(OSError):
        core = os.pidfd_open(os.getppid())
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        if f"{OWNER}={os.environ[OWNER]}".encode() in variables:
            return core
    return None


def _without_llvm(register: Callable[[], None]) -> Callable[[], None]:
    """Return `register`, made to run with the modules of llvmlite (Numba's LLVM binding) removed from `sys.modules`.

    vLLM's `register` searches the values in all loaded modules for Triton kernels. It fails with AttributeError at an object of llvmlite
    that claims to have every attribute.
    """

    def hidden() -> None:
        found = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llvmlite"}
        try:
            register()
        finally:
            sys.modules.update(found)

    return hidden


def _prepare_for_cpu() -> None:
    from vllm import platforms  # a spawned core may import this module before vllm; its kernels would be missing

    if platforms.current_platform.is_cpu():
        from marlaas_worker.rollout import vllm_cpu

        name = "marlaas_worker.rollout.vllm_cpu.GroupedAdapters"
        platform = type(platforms.current_platform)
        platform.get_punica_wrapper = classmethod(lambda _: name)
        platform.register_triton_kernel_overrides = staticmethod(
            _without_llvm(platform.register_triton_kernel_overrides)
        )
        vllm_cpu.register()
        _prefer_owner()


def _prefer_owner() -> None:
    """Raise this process's niceness, so that the owner, the process of the rollout role, goes first where both want the same core.

    Does nothing in the owner.
    """
    if os.getpid() != _owner_pid() and os.getpriority(os.PRIO_PROCESS, 0) < CORE_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, CORE_NICENESS)


def prepare_process() -> None:
    """Prepare a process of vLLM: it exits with its owner; on a CPU it uses our kernels, and its priority is below its owner's."""
    _watch_owner()
    _prepare_for_cpu()


# At import: vLLM has no other hook in a worker before it loads the model, which may take minutes.
if OWNER in os.environ:
    prepare_process()

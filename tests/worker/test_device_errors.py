"""Errors of devices sorted by the words of drivers and libraries, and the failures that jobs wait for."""

from contextlib import suppress

import pytest

from marlaas_api.blobs import BlobUnavailable
from marlaas_worker.device_errors import first_line, is_out_of_memory, says_lost
from marlaas_worker.waits import KEPT_S, SILENT_S, Waits

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)
LOST, NO_MEMORY, NEITHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), LOST),
        (RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"), LOST),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), LOST),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), LOST),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), LOST),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 79.10 GiB"), NO_MEMORY),
        (RuntimeError("CUDA error: out of memory"), NO_MEMORY),
        (RuntimeError(ALLOCATOR), NO_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), NO_MEMORY),
        (MemoryError(), NO_MEMORY),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x64 and 32x8)"), NEITHER),
        (RuntimeError("CUDA error: invalid configuration argument"), NEITHER),
        (ValueError("out of memory"), NEITHER),
    ],
)
def test_an_error_is_of_a_lost_device_of_memory_or_neither(error, expected):
    assert (says_lost(str(error)), is_out_of_memory(error)) == expected


def test_of_a_long_error_the_first_line_is_told():
    assert first_line(RuntimeError("CUDA error: unknown\nFor debugging ...")) == "RuntimeError: CUDA error: unknown"
    assert first_line(MemoryError()) == "MemoryError: no words"


async def test_calls_that_a_silent_store_lets_time_out_are_one_wait_since_the_first_one_began():
    now = [100.0]
    waits = Waits(lambda: now[0])
    for _ in range(3):
        with suppress(BlobUnavailable):
            async with waits.watched("u", "write", "x"):
                now[0] += SILENT_S + 1 + 4 * KEPT_S
                assert waits.reported()["u"].since == 100.0
                raise BlobUnavailable("operation timed out")
        assert waits.reported()["u"].since == 100.0
        now[0] += KEPT_S / 2

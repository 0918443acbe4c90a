"""The words of drivers and libraries, sorted: no memory, a device that is lost, or neither."""

import pytest

from marlaas_worker.device_errors import first_line, is_out_of_memory, says_lost

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

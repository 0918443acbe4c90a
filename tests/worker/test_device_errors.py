"""The words of drivers and libraries, sorted: no memory, a device that is lost, or neither."""

import pytest

from marlaas_worker.device_errors import first_line, is_out_of_memory, says_lost


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "CUDA error: misaligned address",
    ],
)
def test_after_these_words_a_process_can_do_nothing_more_on_its_device(words):
    assert says_lost(words)
    assert not is_out_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_these_are_errors_of_memory_and_the_device_lives_on(error):
    assert is_out_of_memory(error)
    assert not says_lost(str(error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x64 and 32x8)"),
        RuntimeError("CUDA error: invalid configuration argument"),
        ValueError("out of memory"),
    ],
)
def test_these_are_neither(error):
    assert not is_out_of_memory(error)
    assert not says_lost(str(error))


def test_of_a_long_error_the_first_line_is_told():
    assert (
        first_line(RuntimeError("CUDA error: unknown error\nFor debugging consider ..."))
        == "RuntimeError: CUDA error: unknown error"
    )
    assert first_line(MemoryError()) == "MemoryError: no words"

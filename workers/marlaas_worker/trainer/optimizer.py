"""AdamW, its learning rate by step, and the bound on steps whose gradient is not finite. Knows nothing of losses, jobs or the bus."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from marlaas_api.errors import Permanent
from marlaas_api.kinds import OptimizerSpec

MAX_SKIPPED = 3
"""The step that is the so-manieth in a row without a finite gradient fails the agent: one is bad luck, and this many are a job that diverges."""


class GradientInvalid(Permanent):
    """The gradients of too many steps in a row are not finite."""


def learning_rate(optimizer: OptimizerSpec, step: int, num_steps: int) -> float:
    """Rate of a step: linear warm-up to the peak, then the schedule.

    With w warm-up steps, N steps, floor f and k the step's number from 0 (steps without signal and skipped updates count):

        k < w:  peak (k + 1) / w
        else:   peak (f + (1 - f) s(d)),  d = (k - w) / (N - w),  s(d) = 1 (constant), 1 - d (linear), (1 + cos(pi d)) / 2 (cosine)

    The form is that of `get_*_schedule_with_warmup` of Hugging Face transformers, but the first warm-up step is not at rate 0; cosine is eq. 5 of
    Loshchilov & Hutter, SGDR (arXiv 1608.03983), for one period. The floor is reached when step N would begin. Raising N stretches the schedule:
    the rate of a later step is the one that it has in a job of N steps from the start, and may be above that of the step before.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    floor = optimizer.min_learning_rate_ratio or 0.0
    return optimizer.learning_rate * (floor + (1.0 - floor) * decay[optimizer.schedule])


def adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """The optimizer; its learning rate is set at every step."""
    return torch.optim.AdamW(
        parameters, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, weight_decay=spec.weight_decay
    )


def update(optimizer: torch.optim.AdamW, denominator: float, rate: float, max_norm: float) -> float:
    """Divide the summed gradients by the step's denominator, clip them and step; returns their norm before clipping.

    A norm that is not finite changes neither weights nor moments: one NaN in a moment would stay for ever.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # a layer that no token went through
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(denominator)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return norm

"""AdamW, its learning-rate schedule, and the limit on steps without a finite gradient. Knows nothing of losses, jobs or the bus."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from marlaas_api.errors import Permanent
from marlaas_api.messages.job_spec import OptimizerSettings

MAX_SKIPPED = 3
"""Number of consecutive steps without a finite gradient at which the agent fails: a single one is skipped, this many mean that training diverges."""


class GradientInvalid(Permanent):
    """The gradients of too many consecutive steps are not finite."""


def learning_rate(optimizer: OptimizerSettings, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, then the schedule.

    With w warm-up steps, N steps, floor f and k the step's number from 0 (steps without signal and skipped updates
    count):

        k < w:  peak (k + 1) / w
        else:   peak (f + (1 - f) s(d)),  d = (k - w) / (N - w)

    with s(d) = 1 (constant), 1 - d (linear), (1 + cos(pi d)) / 2 (cosine).

    The form is that of `get_*_schedule_with_warmup` of Hugging Face transformers, except that the first warm-up step
    has a rate above 0. Cosine is eq. 5 of Loshchilov & Hutter, SGDR (arXiv 1608.03983), for one period. The rate
    would reach the floor at step N, after the last step. Raising N stretches the schedule: later steps get the rates
    of a job that had N steps from the start, so a rate may be above that of the step before.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    floor = optimizer.min_learning_rate_ratio or 0.0
    return optimizer.learning_rate * (floor + (1.0 - floor) * decay[optimizer.schedule])


def adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSettings) -> torch.optim.AdamW:
    """Create the optimizer; `update` sets its learning rate at every step."""
    return torch.optim.AdamW(
        parameters, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, weight_decay=spec.weight_decay
    )


def update(optimizer: torch.optim.AdamW, denominator: float, rate: float, max_norm: float) -> float:
    """Divide the summed gradients by the step's denominator, clip them and step; return their norm before clipping.

    If the norm is not finite, weights and moments are unchanged, because a NaN in a moment would persist.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # no token went through this layer
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(denominator)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return norm

"""AdamW, its learning-rate schedule, the limit on updates without a finite gradient, and the training state as one blob.

Knows nothing of losses, jobs or the bus. The state holds no random state: nothing is drawn after the weights of
version 0, which depend on the job's seed.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from marlaas_api.errors import Permanent
from marlaas_api.messages.training_settings import OptimizerSettings
from marlaas_worker.adapters import write_tensors

MAX_SKIPPED = 3
"""Consecutive updates without a finite gradient at which the agent fails: fewer are skipped, this many mean that training diverges."""


class GradientInvalid(Permanent):
    """The gradients of too many consecutive updates are not finite."""


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


def update(
    optimizer: torch.optim.AdamW, denominator: float, rate: float, max_norm: float, views: Iterable[nn.Parameter] = ()
) -> float:
    """Divide the summed gradients by the denominator, clip them and take an update; return their norm before clipping.

    If the norm is not finite, weights and moments are unchanged, because a NaN in a moment would persist.

    Args:
        denominator: number by which the gradients, which are sums over tokens, are divided (`LossSums.denominator` / `learner.loss_factor`).
        rate: learning rate.
        max_norm: largest norm after clipping.
        views: parameters whose gradients are views of the optimizer's single gradient. The norm is computed from their
            norms, so that it has the same bits as with one parameter per matrix.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # no token went through this layer
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(denominator)
    total = torch.nn.utils.get_total_norm([part.grad for part in views or parameters if part.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    norm = float(total)
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return norm


FILENAME = "state.safetensors"
_CURSOR = "cursor"
_COUNTS = ("num_updates", "token_budget", "num_skipped")


class StateInvalid(Permanent):
    """A blob is not a training state, or belongs to another adapter or step."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Training state of a version: AdamW's moments by parameter name, its step count, and the step that produced the version."""

    step: int = -1
    """The step that produced the version; -1 for version 0."""
    consumed: tuple[str, ...] = ()
    """Names of that step's groups, by position."""
    num_updates: int = 0
    """AdamW's step count."""
    first_moments: Mapping[str, Tensor] = field(default_factory=dict)
    second_moments: Mapping[str, Tensor] = field(default_factory=dict)
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of the fixed KL reference: version 0, the result of supervised fine-tuning, or the adapter that the job names. Empty if they
    have no effect.
    """
    token_budget: int = 0
    """Token budget of later micro-batches; 0: the job's `microbatchTokens`."""
    num_skipped: int = 0
    """Consecutive updates without a finite gradient, up to and including the step's last one."""


def write_state(state: TrainingState) -> bytes:
    """Serialise a state; equal states give equal bytes."""
    cursor = json.dumps({name: getattr(state, name) for name in ("step", "consumed", *_COUNTS)})
    tensors = {_CURSOR: torch.frombuffer(bytearray(cursor.encode()), dtype=torch.uint8)}
    for kind in ("first_moments", "second_moments", "initial"):
        tensors |= {f"{kind}/{name}": value for name, value in getattr(state, kind).items()}
    return write_tensors(tensors)


def read_state(data: bytes) -> TrainingState:
    """Parse a state. Raises StateInvalid."""
    try:
        tensors = load(data)
        cursor = json.loads(bytes(tensors.pop(_CURSOR).tolist()))
        parts: dict[str, dict[str, Tensor]] = {"first_moments": {}, "second_moments": {}, "initial": {}}
        for name, value in tensors.items():
            kind, _, parameter = name.partition("/")
            parts[kind][parameter] = value
        counts = {
            name: int(cursor.get(name, 0)) for name in _COUNTS
        }  # a state of an earlier release lacks the later ones
        return TrainingState(
            step=cursor["step"],
            consumed=tuple(cursor["consumed"]),
            num_updates=counts["num_updates"],
            token_budget=counts["token_budget"],
            num_skipped=counts["num_skipped"],
            **parts,
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StateInvalid(f"the training state cannot be read: {error!r}") from error

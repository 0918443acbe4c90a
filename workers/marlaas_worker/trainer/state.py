"""What an agent's training goes on from besides its adapter's weights, as one blob.

There is no random state in it: nothing is drawn after version 0's weights, and those come from the job's seed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from marlaas_api.errors import Permanent

FILENAME = "state.safetensors"
_CURSOR = "cursor"
_COUNTS = ("num_updates", "token_budget", "num_skipped")


class StateInvalid(Permanent):
    """A state blob is not one, or belongs to another adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """AdamW's moments by parameter name, its step count, and where in the data the version stands.

    step: the step that made the version (-1: version 0). consumed: that step's groups, by position. initial: weights of the
    fixed KL reference (version 0, or the adapter that the job names), unless it is the zero adapter.
    token_budget: of the micro-batches from here on, 0 if it is the job's `microbatchTokens`. num_skipped: steps in a row, this one the last,
    whose gradient was not finite.
    """

    step: int = -1
    consumed: tuple[str, ...] = ()
    num_updates: int = 0
    first_moments: Mapping[str, Tensor] = field(default_factory=dict)
    second_moments: Mapping[str, Tensor] = field(default_factory=dict)
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    token_budget: int = 0
    num_skipped: int = 0


def write_state(state: TrainingState) -> bytes:
    """Serialise; equal states give equal bytes."""
    cursor = json.dumps({name: getattr(state, name) for name in ("step", "consumed", *_COUNTS)})
    tensors = {_CURSOR: torch.frombuffer(bytearray(cursor.encode()), dtype=torch.uint8)}
    for kind in ("first_moments", "second_moments", "initial"):
        tensors |= {f"{kind}/{name}": value.detach().cpu().contiguous() for name, value in getattr(state, kind).items()}
    data: bytes = save(tensors)
    return data


def read_state(data: bytes) -> TrainingState:
    """Parse. Raises StateInvalid."""
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
        raise StateInvalid(f"a training state cannot be read: {error!r}") from error

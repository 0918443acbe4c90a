"""Training state of an agent besides its adapter's weights, as one blob.

It holds no random state: nothing is drawn after the weights of version 0, which depend on the job's seed.
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
    """A blob is not a training state, or belongs to another adapter or step."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """AdamW's moments by parameter name, its step count, and the version's position in the data.

    step: the step that produced the version; -1 for version 0. consumed: that step's groups, by position.
    initial: weights of the fixed KL reference (version 0, or the adapter that the job names); empty if it is the zero
    adapter.
    token_budget: token budget of later micro-batches; 0: the job's `microbatchTokens`.
    num_skipped: consecutive steps without a finite gradient, up to and including this one.
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
    """Serialise a state; equal states give equal bytes."""
    cursor = json.dumps({name: getattr(state, name) for name in ("step", "consumed", *_COUNTS)})
    tensors = {_CURSOR: torch.frombuffer(bytearray(cursor.encode()), dtype=torch.uint8)}
    for kind in ("first_moments", "second_moments", "initial"):
        tensors |= {f"{kind}/{name}": value.detach().cpu().contiguous() for name, value in getattr(state, kind).items()}
    data: bytes = save(tensors)
    return data


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
        raise StateInvalid(f"a training state cannot be read: {error!r}") from error

"""A base model that fails where a test says: as a device does, in the middle of a pass, with what it had computed by then."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from marlaas_worker.trainer import service
from marlaas_worker.trainer.batching import MicroBatch
from marlaas_worker.trainer.lora import AttachedAdapter
from marlaas_worker.trainer.memory import memory_errors
from marlaas_worker.trainer.model import BaseModel


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of an adapter of this rank; trained: of a step's micro-batch, not of probes or measurements."""

    place: str
    rank: int
    trained: bool
    num_tokens: int


@dataclass
class Faults:
    """What fails. `rule` may raise, or return True for gradients that are not finite; failed: the passes that did."""

    rule: Callable[[Pass], bool] = lambda _: False
    failed: list[Pass] = field(default_factory=list)

    def at(self, found: Pass) -> bool:
        try:
            broken = self.rule(found)
        except Exception:
            self.failed.append(found)
            raise
        if broken:
            self.failed.append(found)
        return broken


class FragileModel(BaseModel):
    """See `faults`, which is shared by all of them while a test runs."""

    faults = Faults()
    _active_adapter: AttachedAdapter | None = None
    _temperature = 1.0

    def logprobs(self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float) -> Tensor:
        self._active_adapter, self._temperature = adapter, temperature
        return super().logprobs(adapter, batch, temperature)

    def backward(self, loss: Tensor, batch: MicroBatch) -> None:
        super().backward(loss, batch)
        with memory_errors(batch):
            if self.faults.at(self._pass("backward", batch)) and self._active_adapter is not None:
                for parameter in self._active_adapter.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.fill_(float("nan"))

    def _hidden(self, batch: MicroBatch) -> Tensor:
        hidden = super()._hidden(batch)
        self.faults.at(self._pass("forward", batch))
        return hidden

    def _pass(self, place: str, batch: MicroBatch) -> Pass:
        rank = 0 if self._active_adapter is None else self._active_adapter.config.rank
        trained = self._temperature != 1.0 and (torch.is_grad_enabled() or place == "backward")
        return Pass(place, rank, trained, batch.num_padded_tokens)


def fragile(monkeypatch: pytest.MonkeyPatch, rule: Callable[[Pass], Any]) -> Faults:
    """Let trainers have such a model from now on; `rule` may be replaced later."""
    faults = Faults(rule)
    monkeypatch.setattr(FragileModel, "faults", faults)
    monkeypatch.setattr(service, "BaseModel", FragileModel)
    return faults


def no_room_above(num_tokens: int, *, rank: int = 8, place: str = "forward") -> Callable[[Pass], bool]:
    """A device on which a trained micro-batch of more padded tokens does not fit."""

    def rule(found: Pass) -> bool:
        if found.place == place and found.rank == rank and found.trained and found.num_tokens > num_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return False

    return rule

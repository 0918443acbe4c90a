"""Gradient checkpointing by measure: a micro-batch whose activations would not fit keeps each layer's input alone.

The layer is computed again in the backward pass, by the same kernels on the same numbers (there is no dropout): the same bits, for about half more time
than forward and backward take otherwise. What a token costs is counted, not estimated from the architecture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


class LayerRecompute:
    """The decoder's layers, and whether they are computed twice.

    max_bytes: the most that activations may take; None never computes twice. bytes_per_token: what they take, once measured.
    """

    def __init__(self, decoder: nn.Module, max_bytes: int | None) -> None:
        self.max_bytes, self.bytes_per_token = max_bytes, 0.0
        self._decoder, self._is_on = decoder, False
        for layer in decoder.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = self._twice(layer.forward)

    def measure(self, forward: Callable[[], object], num_tokens: int) -> None:
        """Count what a forward pass over so many tokens keeps for its backward pass, weights aside."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._decoder.parameters()}
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(count, _as_it_is):
            graph = forward()
        self.bytes_per_token = sum(kept.values()) / num_tokens
        del graph  # until here: a freed tensor's place in memory would be counted as another's

    @contextmanager
    def choose(self, num_tokens: int, mask_bytes: int) -> Iterator[None]:
        """Within, a forward pass over so many padded tokens keeps what fits beside its attention mask."""
        needed = self.bytes_per_token * num_tokens + mask_bytes
        self._is_on = self.max_bytes is not None and needed > self.max_bytes
        try:
            yield
        finally:
            self._is_on = False

    def _twice(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if self._is_on and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return forward(*args, **kwargs)

        return chosen


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor

"""Gradient checkpointing when needed: a micro-batch whose activations would not fit keeps only each layer's input.

The backward pass recomputes the layer by the same kernels on the same numbers (there is no dropout), so the results
are bitwise equal. It takes about half more time than forward and backward otherwise take. The memory per token is
measured, not estimated from the architecture.
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
    """Recomputation of the decoder's layers in the backward pass, switched per forward pass.

    max_bytes: most bytes that activations may take; None never recomputes. bytes_per_token: activation bytes per
    token, 0 until measured.
    """

    def __init__(self, decoder: nn.Module, max_bytes: int | None) -> None:
        self.max_bytes, self.bytes_per_token = max_bytes, 0.0
        self._decoder, self._is_on = decoder, False
        for layer in decoder.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = self._twice(layer.forward)

    def measure(self, forward: Callable[[], object], num_tokens: int) -> None:
        """Measure the bytes per token that a forward pass over `num_tokens` tokens keeps for its backward pass, without weights."""
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
        del graph  # kept until here: memory of a freed tensor could be reused and counted under the same address

    @contextmanager
    def choose(self, num_tokens: int, mask_bytes: int) -> Iterator[None]:
        """Within the context, recompute layers if the activations would exceed max_bytes.

        num_tokens: padded tokens of the forward pass. mask_bytes: size of its attention mask, which counts towards
        the limit.
        """
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

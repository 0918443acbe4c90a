"""Device memory of micro-batches: gradient checkpointing where activations would not fit, and the budget after a failure.

A micro-batch whose activations would not fit keeps only each layer's input. The backward pass recomputes the layer by
the same kernels on the same numbers (there is no dropout), so the results are bitwise equal if the kernels are
deterministic. It takes about half more time than forward and backward otherwise take. The memory per token is measured,
not estimated from the architecture.

The packing of rows decides the order in which gradients are summed, and in 16 bits another packing moves gradients by
up to several percent. So micro-batches are cut by the step's content and token budget alone, never by free memory. The
budget is lowered for a whole step, never within one, to a value that depends only on the budget and the failed
micro-batch, and it is committed with the step's version. Only whether a micro-batch fits depends on the device.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from marlaas_api.errors import Permanent
from marlaas_worker.device_errors import OutOfMemory, is_out_of_memory
from marlaas_worker.trainer.batching import MicroBatch
from marlaas_worker.trainer.rows import Row


class RowTooLarge(Permanent):
    """A single segment does not fit the device's memory, so no lower budget helps."""


@contextmanager
def memory_errors(batch: MicroBatch) -> Iterator[None]:
    """Raise OutOfMemory, with the micro-batch's size, where the device has no memory for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{batch.num_padded_tokens} tokens ({len(batch.ids)} rows of {batch.ids.shape[1]}) do not fit the device's memory"
        ) from error


def free_memory(device: torch.device) -> None:
    """Free memory that a failed computation held: objects in reference cycles, and the allocator's cache.

    The cache is fragmented after such a failure.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lowered_budget(budget: int, rows: Sequence[Row]) -> int:
    """Return the token budget with which to restart a step after a micro-batch of these rows did not fit.

    The budget is halved until it is less than the failed micro-batch's size, because a larger one would produce the
    same micro-batch.

    Raises:
        RowTooLarge: the micro-batch was a single segment, which no budget divides.
    """
    num_tokens = len(rows) * max(map(len, rows))
    if len(rows) == 1 and rows[0].num_segments == 1:
        raise RowTooLarge(
            f"one conversation of {num_tokens} tokens does not fit the trainer's memory, and a smaller training.microbatchTokens cannot divide it: "
            "lower rollout.maxTokens or rollout.maxTurns in a new job, or give the pool's trainer more memory or a smaller trainer.activationBytes"
        )
    budget //= 2
    while budget >= num_tokens:
        budget //= 2
    return max(1, budget)


class LayerRecompute:
    """Recomputation of the decoder's layers in the backward pass, switched per forward pass.

    max_bytes: most bytes that activations may take; None never recomputes. bytes_per_token: activation bytes per
    token, 0 until measured.
    """

    def __init__(self, decoder: nn.Module, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes_per_token = 0.0
        self._decoder = decoder
        self._is_on = False
        for layer in decoder.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = self._twice(layer.forward)

    def measure(self, forward: Callable[[], object], num_tokens: int, adapter: Tensor) -> None:
        """Measure the bytes per token that a forward pass over `num_tokens` tokens keeps for its backward pass.

        Weights are not counted. adapter: the buffer of those that are not part of the decoder.
        """
        weights = {weight.untyped_storage().data_ptr() for weight in (*self._decoder.parameters(), adapter)}
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would form a cycle through its graph, which is never freed

        with saved_tensors_hooks(count, lambda tensor: tensor):
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

"""Device memory of micro-batches: gradient checkpointing where activations would not fit, and the budget after a failure.

Where the activations of a micro-batch would not fit, some layers keep only their input, or only the input of their MLP.
The backward pass recomputes the rest by the same kernels on the same numbers (there is no dropout), so the results are
bitwise equal if the kernels are deterministic, whatever is recomputed. As few layers are recomputed as the memory
allows; with all layers recomputed, forward and backward together take about half longer. The memory per token is
measured, not estimated from the architecture.

The packing of rows decides the order in which gradients are summed, and in 16 bits another packing moves gradients by
up to several percent. So micro-batches are cut by the step's content and token budget alone, never by free memory. The
budget is lowered for a whole step, never within one, to a value that depends only on the budget and the failed
micro-batch, and it is committed with the step's version. Only whether a micro-batch fits depends on the device.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from marlaas_api.errors import Permanent
from marlaas_worker.devices import OutOfMemory, is_out_of_memory
from marlaas_worker.trainer.batching import MicroBatch, Row


class RowTooLarge(Permanent):
    """A single segment does not fit the device's memory, so no lower budget helps."""


@contextmanager
def memory_errors(batch: MicroBatch) -> Iterator[None]:
    """Within the context, raise OutOfMemory with the micro-batch's size if the device has no memory for it."""
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


class Recomputed(NamedTuple):
    """Parts of the decoder that a backward pass recomputes: the first `layers` layers, and the MLPs of the `mlps` layers after them.

    The backward pass ends with the first layers. By then it has freed the later ones, so there is memory for recomputing a layer.
    """

    layers: int = 0
    mlps: int = 0


class Part(NamedTuple):
    """A part of each layer of the decoder that the backward pass can recompute.

    Attributes:
        saved: bytes of activations that recomputing the part saves in one layer.
        cost: time of recomputing it in one layer, in any unit.
    """

    saved: float
    cost: float


def cheapest(excess: float, layer: Part, mlp: Part, num_layers: int) -> Recomputed:
    """Return the parts whose recomputation saves `excess` bytes at the least cost; all layers if nothing saves that much.

    Args:
        excess: bytes by which the activations exceed the limit.
        layer: the whole layer as a part.
        mlp: the layer's MLP as a part.
        num_layers: number of the decoder's layers.
    """
    best = Recomputed(num_layers), num_layers * layer.cost
    for layers in range(num_layers + 1):
        mlps = math.ceil(max(0.0, excess - layers * layer.saved) / max(1.0, mlp.saved))
        cost = layers * layer.cost + mlps * mlp.cost
        if layers + mlps <= num_layers and cost < best[1]:
            best = Recomputed(layers, mlps), cost
    return best[0]


_ATTENTION_PRICE = 2
"""Time of a multiplication in attention relative to one in a large matrix product. On an H200 attention's forward pass has 0.8 of the rate
of such products, or 0.2 to 0.4 with the kernels that a strict job may use."""


class LayerRecompute:
    """Recomputation of the decoder's layers, or of their MLPs, in the backward pass, chosen per forward pass.

    Wraps the `forward` of layers and MLPs, so create it after everything else that replaces their `forward`.

    Attributes:
        max_bytes: most bytes that activations may take; None never recomputes.
        bytes_per_token: activation bytes per token without recomputation, 0 until measured.
    """

    def __init__(self, decoder: nn.Module, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes_per_token = 0.0
        self._saved = [0.0, 0.0]  # bytes per token that recomputation of a layer saves, and of its MLP
        self._decoder: Any = decoder
        self._now = Recomputed()
        self._given: Recomputed | None = None
        self._layers: list[Any] = [one for one in decoder.modules() if isinstance(one, GradientCheckpointingLayer)]
        for place, layer in enumerate(self._layers):
            layer.forward = self._twice(layer.forward, partial(self._recomputes_layer, place))
            if isinstance(getattr(layer, "mlp", None), nn.Module):
                layer.mlp.forward = self._twice(layer.mlp.forward, partial(self._recomputes_mlp, place))

    def measure(self, forward: Callable[[], object], num_tokens: int, adapter: Tensor) -> None:
        """Measure the bytes per token that a forward pass saves for its backward pass, and how many of them recomputation frees.

        Args:
            forward: runs a forward pass over `num_tokens` tokens, and returns its result, which holds the graph.
            adapter: buffer of the adapter's weights, which are not counted, like the decoder's.
        """
        num_layers = len(self._layers)
        plans = Recomputed(), Recomputed(num_layers), Recomputed(mlps=num_layers)
        kept, *others = (self._kept(forward, adapter, plan) / num_tokens for plan in plans)
        self.bytes_per_token = kept
        self._saved = [(kept - other) / max(1, num_layers) for other in others]

    @contextmanager
    def choose(self, num_rows: int, width: int, mask_bytes: int) -> Iterator[None]:
        """Within the context, recompute parts of the decoder if the activations would exceed max_bytes: those that cost least and suffice.

        Args:
            num_rows: number of the micro-batch's rows.
            width: padded length of a row, in tokens.
            mask_bytes: size of the attention mask, which counts towards the limit.
        """
        needed = self.bytes_per_token * num_rows * width + mask_bytes
        plan = self._given or Recomputed()
        if self._given is None and self.max_bytes is not None and needed > self.max_bytes:
            pairs = zip(self._saved, self._costs(width), strict=True)
            layer, mlp = (Part(num_rows * width * saved, cost) for saved, cost in pairs)
            plan = cheapest(needed - self.max_bytes, layer, mlp, len(self._layers))
        self._now = plan
        try:
            yield
        finally:
            self._now = Recomputed()

    @contextmanager
    def always(self, plan: Recomputed | None) -> Iterator[None]:
        """Within the context, let every forward pass recompute the parts of `plan`; None: as `choose` decides. For measurements."""
        before, self._given = self._given, plan
        try:
            yield
        finally:
            self._given = before

    def _kept(self, forward: Callable[[], object], adapter: Tensor, plan: Recomputed) -> int:
        weights = {weight.untyped_storage().data_ptr() for weight in (*self._decoder.parameters(), adapter)}
        kept: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would form a cycle through its graph, which is never freed

        with saved_tensors_hooks(count, lambda tensor: tensor), self.always(plan):
            graph = forward()
        del graph  # kept until here: memory of a freed tensor could be reused and counted under the same address
        return sum(kept.values())

    def _costs(self, width: int) -> tuple[float, float]:
        """Return the multiplications of a token in a layer and in its MLP, in rows of `width` tokens.

        In a mixture of experts they are counted as if all experts computed the token.
        """
        if not self._layers:
            return 0.0, 0.0
        first = self._layers[0]
        whole, mlp = (_num_weights(part) for part in (first, getattr(first, "mlp", None)))
        hidden = int(self._decoder.config.get_text_config().hidden_size)
        return whole + _ATTENTION_PRICE * width * hidden, mlp

    def _recomputes_layer(self, place: int) -> bool:
        return place < self._now.layers

    def _recomputes_mlp(self, place: int) -> bool:
        return 0 <= place - self._now.layers < self._now.mlps

    def _twice(self, forward: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if is_on() and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            return forward(*args, **kwargs)

        return chosen


def _num_weights(module: nn.Module | None) -> int:
    return sum(weight.numel() for weight in module.parameters()) if isinstance(module, nn.Module) else 0

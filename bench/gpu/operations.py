"""Operations of a forward and backward pass, and memory that it keeps for each token: counted on tensors without data, so no GPU is needed.

An operation that computes something is about one launch of a kernel on a GPU; fused attention counts once for each direction. Not
counted: second kernels of one operation (split-K), and views.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu import shapes
from marlaas_worker.trainer.memory import Recomputed
from marlaas_worker.trainer.model import BaseModel

META = torch.device("meta")


def main(words: Sequence[str] = ()) -> None:
    parser = shapes.options("operations", __doc__)
    parser.add_argument("--batches", default="2x2048", help="rows x tokens of the batches")
    chosen = parser.parse_args(words)
    columns = ("shape", "batch", "recomputed", "operations", "most frequent", "KiB a token and layer")
    shapes.show(columns, _rows(chosen))


def _rows(chosen: argparse.Namespace) -> Iterator[Sequence[Any]]:
    for batch in chosen.batches.split(","):
        rows, width = (int(number) for number in batch.split("x"))
        for side, plan in PLANS.items():
            found = count(chosen.shape, rows, width, plan=plan)
            often = ", ".join(f"{name} {number}" for name, number in found.operations.most_common(8))
            yield chosen.shape, batch, side, found.operations.total(), often, f"{found.kept_bytes / 1024:.1f}"


ALL = 1 << 20
PLANS = {"nothing": Recomputed(), "MLPs": Recomputed(mlps=ALL), "layers": Recomputed(layers=ALL)}
"""Parts of the decoder that the backward pass computes again, by the name of the table's row."""


class Counts(NamedTuple):
    """operations: of a forward and backward pass, by name. kept_bytes: for the backward pass, for each token and layer."""

    operations: Counter[str]
    kept_bytes: float


def count(
    shape: str, rows: int, width: int, num_layers: int | None = None, plan: Recomputed = PLANS["nothing"]
) -> Counts:
    """Count the second pass of a bfloat16 model with an adapter on every linear layer: the first one also copies the adapter."""
    with Operations(), mock.patch.object(nn.functional, "scaled_dot_product_attention", _attention):
        base, num_layers = _base_model(shape, num_layers)
        adapter = base.attach(shapes.RANK, shapes.ALPHA, ())
        adapter.collect_gradients()
        batch = shapes.random_rows(base.vocab_size, rows, width)
        base.backward(base.logprobs(adapter, batch, 1.0).sum(), batch)
        kept = _Kept([adapter.flat, *base._model.parameters()])
        with Operations() as seen:
            with saved_tensors_hooks(kept.note, lambda tensor: tensor), base._recompute.always(plan):
                loss = base.logprobs(adapter, batch, 1.0).sum()
            base.backward(loss, batch)
    return Counts(seen.counted, sum(kept.sizes.values()) / batch.num_padded_tokens / num_layers)


def _base_model(shape: str, num_layers: int | None) -> tuple[BaseModel, int]:
    from transformers import LlamaForCausalLM

    config = shapes.config(shape)
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    with META:
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    base = BaseModel.__new__(BaseModel)  # its constructor reads a folder, and tests the architecture on numbers
    base.device, base._name, base._hub = META, shape, None
    base._adopt(model, None)
    assert all(base.lean_layers.values())
    return base, config.num_hidden_layers


OF_WHOLE_NUMBERS = {"bincount", "cumsum"}
"""Their sums have one result then, without weights; of others, torch has no deterministic kernel."""
VIEWS = {"view", "permute", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "detach", "alias", "as_strided", "select", "split_with_sizes", "split", "empty_like", "empty", "empty_strided", "new_empty"}  # fmt: skip


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and whether torch was deterministic at them (`modes`).

    Of tensors without numbers, a question for a value, as of comparisons, is answered with yes.
    """

    def __init__(self, has_numbers: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted, self.modes = Counter[str](), Counter[bool]()
        self._has_numbers = has_numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.modes[torch.are_deterministic_algorithms_enabled()] += 1
        if name in OF_WHOLE_NUMBERS and not (args[0].is_floating_point() or len(args) > 2):
            self.counted[f"{name} of whole numbers"] += 1
        elif name not in VIEWS:
            self.counted[name] += 1
        is_answered = not self._has_numbers and name in {"_local_scalar_dense", "equal"}
        return True if is_answered else func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Fused attention: keeps its inputs, its output, and a float32 number for each token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query.transpose(1, 2)).transpose(1, 2).fill_(0)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:3], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query).fill_(0), torch.empty_like(key), torch.empty_like(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    result: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result


class _Kept:
    """Sizes of the tensors that a graph keeps, without weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self.sizes: dict[int, int] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self.sizes[storage._cdata] = storage.nbytes()
        return tensor.detach()

"""One frozen base model with the adapters of many agents, one of them active at a time.

Each adapter has its own parameters, so work on one cannot change another. The model is in eval mode without dropout:
a forward pass depends only on weights and tokens. Knows nothing of jobs, steps or the bus. Not thread-safe: only the
compute thread uses it (`compute`).

Properties of the architecture on which the trainer depends are tested on the loaded model instead of by name. Every test compares values
bit by bit or by order, without a tolerance, so its result is the same in float32 and in bfloat16.
"""

import difflib
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from marlaas.models.inspection import is_adaptable
from marlaas_api.messages.pool_spec import HubSource
from marlaas_worker.adapters import DTYPES, AdapterConfig, choose_dtype
from marlaas_worker.base_model import ModelUnusable, load_base_model
from marlaas_worker.devices import uses_gpu
from marlaas_worker.trainer.batching import MicroBatch, Segment, TokenTrees, chain, collate, pack_prefix_tree
from marlaas_worker.trainer.compute import compute_reproducibly
from marlaas_worker.trainer.head import (
    in_float32,
    precise_token_logprobs,
    token_logprobs,
    token_logprobs_and_entropies,
    token_logprobs_and_ranks,
)
from marlaas_worker.trainer.lean_layers import replace_layers
from marlaas_worker.trainer.lora import ActiveAdapter, AttachedAdapter, TargetUnknown, adapt_layers, new_adapter
from marlaas_worker.trainer.memory import LayerRecompute, free_memory, memory_errors
from marlaas_worker.trainer.tree_attention import BLOCK, attend_by_blocks, block_mask, dense_mask

log = logging.getLogger(__name__)


class BaseModel:
    """A causal language model in Hugging Face format. Adapters are float32, whatever the model's dtype.

    Attributes:
        linear_layers: short names of the layers that an adapter may target (`q_proj`): the decoder's linear layers without
            routers and experts. An engine adapts the same layers.
        lean_layers: number of replaced layers by kind (`lean_layers.replace_layers`).
        pairs_per_token: number of token pairs in attention that cost as much as one token in the rest of the network, for
            `batching.pack_prefix_tree`; 0 if the architecture cannot share prefixes. With hidden size H, a layer costs about
            24 H^2 operations per token, and 4 H per pair of tokens in its attention.

    Args:
        path: folder of the model.
        device: None: a GPU if `devices.uses_gpu`, else the CPU.
        activation_bytes: if a micro-batch's activations need more memory, as many layers as necessary are recomputed
            in the backward pass. The results are bitwise equal (on a GPU within `compute.deterministic(True)`), and a
            step takes up to half longer. None: never recompute.
        dtype: None: float32 on a CPU, bfloat16 on a GPU.
        hub: the model's repository, which adapters name as their base; None: they have the folder's name.

    Raises:
        ModelUnusable: the folder cannot be read, or the logits are not the head's product with the decoder's output.
    """

    def __init__(
        self,
        path: str,
        device: str | None = None,
        activation_bytes: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        hub: HubSource | None = None,
    ) -> None:
        self.device = torch.device(device or ("cuda" if uses_gpu() else "cpu"))
        compute_reproducibly(self.device)
        self._name = Path(path).name
        self._hub = hub
        dtype = dtype or DTYPES[choose_dtype("auto", self.device.type != "cpu")]
        self._adopt(load_base_model(Path(path), dtype).to(self.device), activation_bytes)
        check_head(self._model, self._name)
        with torch.no_grad():
            shares = shares_prefixes(self._model.config, lambda batch: self.logprobs(None, batch, 1.0))
        self._by_blocks = shares and self.device.type == "cuda" and attend_by_blocks(self._model, self.device)
        self.pairs_per_token = 6 * int(self._model.config.get_text_config().hidden_size) if shares else 0

    def _adopt(self, model: Any, activation_bytes: int | None) -> None:
        self._model = model
        self._by_blocks = False
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._layers = self._adaptable_layers()
        self.linear_layers = tuple(sorted({name.rsplit(".", 1)[-1] for name in self._layers}))
        self._active = ActiveAdapter()
        adapt_layers(model, self._layers, self._active)
        self.lean_layers = replace_layers(self._decoder)
        self._recompute = LayerRecompute(self._decoder, activation_bytes)
        self._attached: dict[str, AttachedAdapter] = {}
        self._numbers = itertools.count(1)

    @property
    def parameters_per_rank(self) -> int:
        """Number of parameters that an adapter on every layer has for each unit of its rank."""
        return sum(layer.in_features + layer.out_features for layer in self._layers.values())

    @property
    def activation_bytes_per_token(self) -> float:
        """Activation memory in bytes of a padded token between forward and backward pass, without recomputation.

        It is 0 until measured at the first adapter.
        """
        return self._recompute.bytes_per_token

    def limit_activations(self, max_bytes: int) -> None:
        """Set `activation_bytes`, for example to a part of the memory that is left after loading."""
        self._recompute.max_bytes = max_bytes

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the attached adapters."""
        return tuple(self._attached)

    @property
    def source(self) -> tuple[str, str | None]:
        """Name and revision by which adapters name this model: the hub's, or the folder's name and None."""
        return (self._hub.id, self._hub.revision) if self._hub is not None else (self._name, None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = self._head.weight.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is below it."""
        return int(self._head.weight.shape[0])

    def attach(self, rank: int, alpha: int, targets: Sequence[str]) -> AttachedAdapter:
        """Add an adapter with all weights zero, and return it.

        Args:
            rank: LoRA rank.
            alpha: the adapter's output is scaled by alpha / rank.
            targets: names as in `linear_layers`; empty: all of them.

        Raises:
            TargetUnknown: the model has no layer of a name in `targets`.
        """
        wanted = self._resolve(targets)
        layers = {name: layer for name, layer in self._layers.items() if name.rsplit(".", 1)[-1] in wanted}
        name = f"adapter{next(self._numbers)}"
        adapter = new_adapter(name, AdapterConfig(rank, alpha, *self.source), layers, self.device)
        if not self._recompute.bytes_per_token:
            self._measure_activations(adapter)
        self._attached[name] = adapter
        return adapter

    def detach(self, adapter: AttachedAdapter) -> None:
        """Detach an adapter, so that its memory is freed with the caller's last reference. May be repeated."""
        self._attached.pop(adapter.name, None)
        self._active.detach(adapter)

    def free_memory(self) -> None:
        """Free memory that a failed computation still holds on the device."""
        free_memory(self.device)

    def logprobs(self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float) -> Tensor:
        """Return the logprobs [N] of the batch's generated tokens under softmax(logits / temperature), with gradient.

        adapter None: the base model without adapter. Only the hidden states before generated tokens go through the
        head. Raises OutOfMemory.
        """
        with memory_errors(batch), self._recomputing(batch):
            before = self._before(adapter, batch)
            return token_logprobs(before, self._head.weight, self._tensor(batch.targets), temperature)

    def logprobs_and_entropies(
        self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, and the entropies [N], in nats, of the distributions from which the tokens are drawn. Raises OutOfMemory."""
        with memory_errors(batch), self._recomputing(batch):
            before = self._before(adapter, batch)
            return token_logprobs_and_entropies(before, self._head.weight, self._tensor(batch.targets), temperature)

    def logprobs_and_ranks(
        self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, and for each token 1.0 if it is the most probable one, else 0.0 [N]. Raises OutOfMemory."""
        with memory_errors(batch), self._recomputing(batch):
            before = self._before(adapter, batch)
            return token_logprobs_and_ranks(before, self._head.weight, self._tensor(batch.targets), temperature)

    @torch.no_grad()
    def precise_logprobs(self, adapter: AttachedAdapter | None, batch: MicroBatch) -> Tensor:
        """Return `logprobs` at temperature 1, computed in float32 layer by layer from the same weights; for calibration."""
        with in_float32(self._decoder):
            before = self._before(adapter, batch)
            return precise_token_logprobs(before, self._head.weight, self._tensor(batch.targets))

    @torch.no_grad()
    def write(self, ids: Tensor, num_tokens: int, draw: torch.Generator) -> Tensor:
        """Extend rows of ids [B, T] to `num_tokens` each, sampled from the base model without adapter at temperature 1.

        draw: source of the random numbers. The sampling runs on the CPU.
        """
        self._activate(None)
        step, past = ids, None
        while ids.shape[1] < num_tokens:
            output = self._decoder(input_ids=step.to(self.device), past_key_values=past, use_cache=True)
            logits = (output.last_hidden_state[:, -1] @ self._head.weight.T).float().cpu()
            step, past = torch.multinomial(logits.softmax(-1), 1, generator=draw), output.past_key_values
            ids = torch.cat((ids, step), dim=1)
        return ids

    def layer_shapes(self) -> dict[str, tuple[int, int, float]]:
        """Return the shape and scale of each layer that an adapter may target, by the model's own layer names.

        The values are output width, input width, and root mean square of the weights.
        """
        return {
            name: (layer.out_features, layer.in_features, layer.weight.float().square().mean().sqrt().item())
            for name, layer in self._layers.items()
        }

    def backward(self, loss: Tensor, batch: MicroBatch) -> None:
        """Add the loss's gradient to the active adapter's parameters. Raises OutOfMemory."""
        with memory_errors(batch):
            loss.backward()  # type: ignore[no-untyped-call]

    def _recomputing(self, batch: MicroBatch) -> AbstractContextManager[None]:
        mask_bytes = 0 if self._by_blocks else batch.num_masked_pairs * self.dtype.itemsize
        num_rows, width = batch.ids.shape
        return self._recompute.choose(num_rows, width, mask_bytes)

    def _before(self, adapter: AttachedAdapter | None, batch: MicroBatch) -> Tensor:
        """Return the hidden states [N, H] from which the generated tokens are predicted."""
        self._activate(adapter)
        return self._hidden(batch).flatten(0, 1).index_select(0, self._tensor(batch.before))

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states [B, T, H]; each token attends to the tokens before it, or to its ancestors in the batch's trees."""
        attention = {}
        if (trees := batch.trees) is not None:
            attention = {"position_ids": self._tensor(trees.depths), "attention_mask": self._mask(trees)}
        hidden: Tensor = self._decoder(
            input_ids=self._tensor(batch.ids), use_cache=False, **attention
        ).last_hidden_state
        return hidden

    def _mask(self, trees: TokenTrees) -> Tensor | BlockMask:
        """Return the attention mask, which is made once and shared by all layers."""
        enters, leaves = self._tensor(trees.enters), self._tensor(trees.leaves)
        if self._by_blocks and enters.numel() > BLOCK:
            return block_mask(enters, leaves)
        return dense_mask(enters, leaves, self.dtype)

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _activate(self, adapter: AttachedAdapter | None) -> None:
        self._active.adapter = adapter

    def _adaptable_layers(self) -> dict[str, nn.Linear]:
        inside = set(self._decoder.modules())
        named = self._model.named_modules()
        linear = ((name, module) for name, module in named if isinstance(module, nn.Linear) and module in inside)
        return {name: module for name, module in linear if is_adaptable(name)}

    def _resolve(self, targets: Sequence[str]) -> list[str]:
        known = self.linear_layers
        for target in targets:
            if target not in known:
                near = difflib.get_close_matches(target, known, n=3, cutoff=0.4)
                raise TargetUnknown(
                    f"adapter target {target!r} is not a linear layer of {self._name}; "
                    + (f"did you mean {' or '.join(near)}? " if near else "")
                    + f"It has {', '.join(known)}"
                )
        return sorted(set(targets)) or list(known)

    def _measure_activations(self, adapter: AttachedAdapter) -> None:
        batch = collate([chain(example([number % self.vocab_size for number in range(64)]))])
        try:
            self._recompute.measure(lambda: self.logprobs(adapter, batch, 1.0), batch.num_padded_tokens, adapter.flat)
        finally:
            self._activate(None)
        log.info("activations take %.0f KiB per token", self._recompute.bytes_per_token / 1024)


def example(ids: Sequence[int]) -> Segment:
    """Return a segment of these tokens in which all but the first are predicted; behaviour logprobs and advantage are 0."""
    generated = np.arange(len(ids)) > 0
    return Segment(np.array(ids, np.int32), generated, np.zeros(len(ids), np.float32), 0, 0.0)


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raise ModelUnusable unless the logits are the head's product, without bias, with the decoder's output.

    Some architectures scale or cap the hidden states before the head, or the logits after it.

    Args:
        model: a causal language model of transformers.
        name: name of the model in the error.
    """
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if getattr(head, "bias", None) is not None:
        raise ModelUnusable(f"{name}: a bias in the output head is not supported")
    ids = torch.arange(16, device=head.weight.device)[None] % head.weight.shape[0]
    around: list[Tensor] = []
    hook = head.register_forward_hook(lambda _, inputs, output: around.extend((inputs[0], output)))
    logits = model(input_ids=ids, use_cache=False).logits
    hook.remove()
    entered, left = around
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    for place, seen, own in (("hidden states before", entered, hidden), ("logits after", left, logits)):
        if not torch.equal(seen.float(), own.float()):
            gap = float((own.float() - seen.float()).abs().max())
            raise ModelUnusable(
                f"{name}: {type(model).__name__} changes its {place} the output head "
                f"(by up to {gap:.3g}); the trainer does not support that"
            )


def shares_prefixes(config: Any, logprobs: Callable[[MicroBatch], Tensor]) -> bool:
    """Return whether the model computes rows that are trees of tokens (`batching.pack_prefix_tree`) correctly.

    A model may reject the attention mask of a tree, or interpret it differently.

    Args:
        config: the model's configuration in transformers.
        logprobs: the model's forward pass, which returns the logprobs [N] of a batch's generated tokens.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "use_sliding_window", getattr(text, "sliding_window", None)):
        return False
    try:
        return _computes_trees(logprobs, text.vocab_size)
    except (RuntimeError, TypeError, ValueError) as error:
        log.info("%s cannot share prefixes: %s", type(config).__name__, error)
        return False


def _computes_trees(logprobs: Callable[[MicroBatch], Tensor], vocab_size: int) -> bool:
    """Return whether a branch's logprobs in a tree of two branches depend on the branch's tokens and depths only.

    All of these must hold:

    - Other tokens in the sibling branch change no bit of the logprobs.
    - Other depths change the logprobs.
    - The logprobs are close to those of the branch in a row of its own. "Close" means: closer than the logprobs of the branch's last
      tokens in a plain row, after the tokens of the sibling.
    """
    ends = ((4, 5), (9, 10), (6, 7, 8))
    left, other, branch = ([number % vocab_size for number in (1, 2, 3, *end)] for end in ends)
    tree, beside = (
        collate(pack_prefix_tree([example(ids), example(branch)], 1 << 20, 1 << 20)) for ids in (left, other)
    )
    depths = np.arange(tree.ids.size)[None]
    flat = replace(tree, trees=tree.trees and replace(tree.trees, depths=depths))
    chained, alone = (collate([chain(example(ids))]) for ids in ([*left, *branch[3:]], branch))
    in_tree, in_other, at_other_depths, after_all, by_itself = (
        logprobs(batch)[-2:] for batch in (tree, beside, flat, chained, alone)
    )
    if not torch.equal(in_tree, in_other) or torch.equal(in_tree, at_other_depths):
        return False
    return bool((in_tree - by_itself).abs().max() < (after_all - by_itself).abs().max())

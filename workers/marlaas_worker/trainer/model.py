"""The gateway to transformers and peft: one frozen base model, and many agents' adapters on it, one active at a time.

Every adapter has its own parameters, so nothing that is done to one can reach another. Eval mode and no dropout: a forward pass is
a function of weights and tokens. Knows nothing of jobs, steps or the bus. Not thread-safe: one thread owns it (`compute`).
"""

import difflib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from marlaas_api.errors import Permanent
from marlaas_api.names import derive_seed
from marlaas_worker.adapters import AdapterConfig, tensor_name
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.head import token_logprobs, token_logprobs_and_entropies
from marlaas_worker.trainer.lora import fuse
from marlaas_worker.trainer.recompute import LayerRecompute
from marlaas_worker.trainer.reproducible import compute_reproducibly
from marlaas_worker.trainer.rows import Segment, chain, plant

log = logging.getLogger(__name__)


class ModelUnusable(Permanent):
    """The base model cannot be loaded, or computes something that the trainer cannot reproduce."""


class TargetUnknown(Permanent):
    """The base model has no linear layer of that name."""


class WeightsMismatch(Permanent):
    """Tensors do not fit the adapter that they are meant for."""


class OutOfMemory(Permanent):
    """A micro-batch does not fit the accelerator."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedAdapter:
    """One adapter on the base model. parameters: by the names that PEFT's file has; A [rank, in] and B [out, rank], float32."""

    name: str
    config: AdapterConfig
    parameters: dict[str, nn.Parameter]

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the weights, in host memory."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights; parameters that `tensors` lacks stay as they are. Raises WeightsMismatch."""
        for name, tensor in tensors.items():
            parameter = self.parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                found = "no such module" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightsMismatch(f"{name} {tuple(tensor.shape)} does not fit this adapter ({found} here)")
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.parameters[name].copy_(tensor)


def initial_weights(parameters: Mapping[str, Tensor], seed: int, agent: str) -> dict[str, Tensor]:
    """Version 0's weights: B zero, A uniform in +-1/sqrt(in) as PEFT draws it, but from the job's seed and the tensor's name alone."""
    weights = {}
    for name, parameter in parameters.items():
        weights[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            draw = torch.Generator().manual_seed(derive_seed(seed, agent, name))
            bound = 1.0 / math.sqrt(parameter.shape[1])
            weights[name].uniform_(-bound, bound, generator=draw)
    return weights


class BaseModel:
    """A causal language model in Hugging Face format: float32 on a CPU, bfloat16 on a GPU; adapters are float32 on both.

    linear_layers: names that an adapter may target, the decoder's linear layers; neither head nor embeddings. pairs_per_token: for `rows.plant`, 0 if the
    architecture cannot share beginnings. activation_bytes: a micro-batch whose activations need more memory computes its layers again in the
    backward pass; the same bits, a third slower. None: never.

    Raises:
        ModelUnusable: the folder cannot be read, or the architecture changes its logits after the head.
    """

    def __init__(self, path: str, device: str | None = None, activation_bytes: int | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        compute_reproducibly(self.device)
        self._name = Path(path).name
        self._model: Any = _load(path, torch.float32 if self.device.type == "cpu" else torch.bfloat16, self.device)
        self._decoder, self._head = self._model.get_decoder(), self._model.get_output_embeddings()
        self.linear_layers = _linear_layers(self._decoder)
        self._recompute = LayerRecompute(self._decoder, activation_bytes)
        self._peft: Any = None
        self._numbers = itertools.count(1)
        self._active: str | None = None
        self._check_head()
        self.pairs_per_token = self._measure_sharing()

    @property
    def activation_bytes_per_token(self) -> float:
        """What a padded token takes between forward and backward pass where layers are not recomputed; 0 before there is an adapter."""
        return self._recompute.bytes_per_token

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are attached."""
        return () if self._peft is None else tuple(self._peft.peft_config)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return int(self._head.weight.shape[0])

    def attach(self, rank: int, alpha: int, targets: Sequence[str]) -> AttachedAdapter:
        """Add an adapter, its weights all zero; `targets` empty means every linear layer. Raises TargetUnknown."""
        wanted = self._resolve(targets)
        name = f"adapter{next(self._numbers)}"
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=wanted, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
        )
        if self._peft is None:
            self._peft = get_peft_model(self._model, config, adapter_name=name)
        else:
            self._peft.add_adapter(name, config)
        fuse(self._model)
        parameters = dict(self._parameters_of(name))
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.zero_()
        self._active = None
        adapter = AttachedAdapter(name, AdapterConfig(rank, alpha, self._name), parameters)
        if not self._recompute.bytes_per_token:
            self._measure_activations(adapter)
        return adapter

    def detach(self, adapter: AttachedAdapter) -> None:
        """Remove an adapter and free its memory; no error when it is gone."""
        if self._peft is None or adapter.name not in self._peft.peft_config:
            return
        self._activate(None)
        self._peft.delete_adapter(adapter.name)

    def logprobs(self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float) -> Tensor:
        """Logprobs [N] of the batch's generated tokens under softmax(logits / temperature); the bare base model without an adapter.

        Carries the gradient of the adapter's parameters. Only hidden states before generated tokens go through the head. Raises OutOfMemory.
        """
        with _memory_errors(batch), self._recompute.choose(batch.num_padded_tokens):
            before = self._before(adapter, batch)
            return token_logprobs(before, self._head.weight, self._tensor(batch.targets), temperature)

    def logprobs_and_entropies(
        self, adapter: AttachedAdapter | None, batch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, and the entropies [N] of the distributions that the generated tokens are drawn from. Raises OutOfMemory."""
        with _memory_errors(batch), self._recompute.choose(batch.num_padded_tokens):
            before = self._before(adapter, batch)
            return token_logprobs_and_entropies(before, self._head.weight, self._tensor(batch.targets), temperature)

    def backward(self, loss: Tensor, batch: MicroBatch) -> None:
        """Add the loss's gradient to the active adapter's parameters. Raises OutOfMemory."""
        with _memory_errors(batch):
            loss.backward()  # type: ignore[no-untyped-call]

    def _before(self, adapter: AttachedAdapter | None, batch: MicroBatch) -> Tensor:
        """Hidden states [N, H] from which the generated tokens are predicted."""
        self._activate(adapter)
        return self._hidden(batch).flatten(0, 1).index_select(0, self._tensor(batch.before))

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Hidden states [B, T, H]; each token attends to what the batch says, or to all before it."""
        attention = {}
        if batch.depths is not None and batch.sees is not None:
            attention = {
                "position_ids": self._tensor(batch.depths),
                "attention_mask": self._additive(self._tensor(batch.sees)[:, None]),
            }
        hidden: Tensor = self._decoder(
            input_ids=self._tensor(batch.ids), use_cache=False, **attention
        ).last_hidden_state
        return hidden

    def _additive(self, sees: Tensor) -> Tensor:
        """0 where a token sees another, -inf elsewhere: the form that attention computes with, made once for all layers, which keep it."""
        return torch.zeros(sees.shape, dtype=self._head.weight.dtype, device=self.device).masked_fill_(~sees, -math.inf)

    def _tensor(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _activate(self, adapter: AttachedAdapter | None) -> None:
        wanted = "" if adapter is None else adapter.name
        if self._peft is not None and wanted != self._active:
            self._peft.base_model.set_adapter([wanted] if wanted else [])
            self._active = wanted

    def _parameters_of(self, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, module in self._model.named_modules():
            if hasattr(module, "lora_A") and adapter in module.lora_A:
                yield tensor_name(name, "A"), module.lora_A[adapter].weight
                yield tensor_name(name, "B"), module.lora_B[adapter].weight

    def _resolve(self, targets: Sequence[str]) -> list[str]:
        known = self.linear_layers
        for target in targets:
            if target not in known:
                near = difflib.get_close_matches(target, known, n=3, cutoff=0.4)
                raise TargetUnknown(
                    f"adapter target {target!r} is no linear layer of {self._name}; "
                    + (f"did you mean {' or '.join(near)}? " if near else "")
                    + f"It has {', '.join(known)}"
                )
        return sorted(set(targets)) or list(known)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own logits: some architectures scale or cap them behind the head, where we would not see it."""
        if getattr(self._head, "bias", None) is not None:
            raise ModelUnusable(f"{self._name}: a bias in the output head is not supported")
        ids = [number % self.vocab_size for number in range(16)]
        own = self._model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, :-1]
        expected = own.float().log_softmax(-1)[torch.arange(15), ids[1:]]
        gap = (expected - self.logprobs(None, collate([chain(_example(ids))]), 1.0)).abs().max().item()
        if not gap < self._tolerance:
            raise ModelUnusable(
                f"{self._name}: {type(self._model).__name__} changes its logits after the output head "
                f"(logprobs differ by {gap:.3g}); the trainer does not support that"
            )

    @torch.no_grad()
    def _measure_sharing(self) -> int:
        """See `pairs_per_token`: tried out, because an architecture may take no mask of ours, or take it for something else.

        A token costs a layer about 24 H^2 operations, a pair of tokens in its attention 4 H.
        """
        config = self._model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(
            config, "use_sliding_window", getattr(config, "sliding_window", None)
        ):
            return 0
        segments = [_example([number % self.vocab_size for number in (1, 2, 3, *end)]) for end in ((4, 5), (6, 7, 8))]
        try:
            shared = self.logprobs(None, collate(plant(segments, 1 << 20, 1 << 20)), 1.0)
        except (RuntimeError, TypeError, ValueError) as error:
            log.info("%s shares no beginnings: %s", self._name, error)
            return 0
        alone = self.logprobs(None, collate([chain(segment) for segment in segments]), 1.0)
        return 6 * int(config.hidden_size) if (shared - alone).abs().max().item() < self._tolerance else 0

    def _measure_activations(self, adapter: AttachedAdapter) -> None:
        batch = collate([chain(_example([number % self.vocab_size for number in range(64)]))])
        self._recompute.measure(lambda: self.logprobs(adapter, batch, 1.0), batch.num_padded_tokens)
        log.info("activations take %.0f KiB per token", self._recompute.bytes_per_token / 1024)

    @property
    def _tolerance(self) -> float:
        """Largest difference of two logprobs that rounding explains: bfloat16 rounds a logit of 20 to eighths."""
        return 1e-2 if self._head.weight.dtype == torch.float32 else 0.25


def _load(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    if not Path(path).is_dir():
        raise ModelUnusable(f"there is no base model at {path}: expected a folder in Hugging Face format")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelUnusable(f"the base model at {path} cannot be loaded: {error}") from error
    return model.requires_grad_(False).eval().to(device)


def _linear_layers(decoder: nn.Module) -> tuple[str, ...]:
    linear = (name for name, module in decoder.named_modules() if isinstance(module, nn.Linear))
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in linear}))


def _example(ids: Sequence[int]) -> Segment:
    generated = np.arange(len(ids)) > 0
    return Segment(np.array(ids, np.int32), generated, np.zeros(len(ids), np.float32), 0, 0.0)


@contextmanager
def _memory_errors(batch: MicroBatch) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{batch.num_padded_tokens} tokens ({len(batch.ids)} rows of {batch.ids.shape[1]}) do not fit the accelerator's memory; "
            "lower training.microbatchTokens, or rollout.maxTokens when it is a single row"
        ) from error

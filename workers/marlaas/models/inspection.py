"""Facts about a model's folder, read from config.json and the headers of the safetensors files, without loading weights.

Standard library only, and takes a few milliseconds, because `marlaas validate` uses it.
"""

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.models.damage import refuse_damaged
from marlaas.models.families import family_of
from marlaas.models.weight_files import read_json, tensors

_NOT_ADAPTED = re.compile(r"embed|head$|experts|router|\bgate\b|\bwte$|\bwpe$")
_EXPERTS = re.compile(r"experts|router|\bgate\b")
_WEIGHT = ".weight"
_TOKENIZER = "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model.

    Attributes:
        architectures: as in config.json.
        num_parameters: number of values in the weight files.
        linear_layers: names that an adapter may target (`q_proj`), each with the shapes [out, in] of its weights,
            one per layer of the model.
        max_positions: longest conversation that the model supports, in tokens; None if config.json lacks it.
        vocab_size, hidden_size, num_layers: as in config.json; 0 if missing.
        has_chat_template: whether the tokenizer has one.
        cached_values: numbers that a KV cache holds of each token; 0 if the architecture has other caches too.
        num_expert_parameters: number of values in the experts of a mixture of experts, routers included.
        family: name of the model's family, which reads its replies; empty if it is of no known family, or if there is no template to tell.
        reads_as_chatml: whether there is a template of no known family.
    """

    architectures: tuple[str, ...]
    num_parameters: int
    linear_layers: dict[str, tuple[tuple[int, int], ...]]
    max_positions: int | None
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    has_chat_template: bool = True
    num_expert_parameters: int = 0
    cached_values: int = 0
    family: str = ""
    reads_as_chatml: bool = False

    def adapter_parameters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Return the number of values in an adapter of these linear layers (empty: all): A [rank, in] and B [out, rank] for each."""
        chosen = [shapes for name, shapes in self.linear_layers.items() if not targets or name in targets]
        return sum(rank * (out + into) for shapes in chosen for out, into in shapes)


def is_adaptable(name: str) -> bool:
    """Return whether a linear layer of this name may carry an adapter: all may, except embeddings, head, routers and experts.

    Engines and trainers choose their layers by this rule too.
    """
    return not _NOT_ADAPTED.search(name)


def inspect(folder: Path) -> ModelFacts:
    """Inspect a folder in Hugging Face format.

    Raises:
        NotAModel: config.json or a header cannot be read, no weights are in safetensors format, or the model is damaged.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    found = list(tensors(folder))
    refuse_damaged(folder, config, found)
    shapes = {one.name: one.shape for one in found}
    settings = text if isinstance(text, dict) else config
    positions = settings.get("max_position_embeddings")
    template = _template(folder)
    family = family_of(template, _tokens(folder)) if template else None
    return ModelFacts(
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        linear_layers=_linear_layers(shapes),
        max_positions=positions if isinstance(positions, int) else None,
        vocab_size=_size(settings, "vocab_size"),
        hidden_size=_size(settings, "hidden_size"),
        num_layers=_size(settings, "num_hidden_layers"),
        has_chat_template=_has_chat_template(folder),
        num_expert_parameters=sum(math.prod(shape) for name, shape in shapes.items() if _EXPERTS.search(name)),
        cached_values=_cached_values(settings),
        family="" if family is None else family.name,
        reads_as_chatml=bool(template) and family is None and not _tokenizer(folder).get("response_template"),
    )


def _has_chat_template(folder: Path) -> bool:
    """Return whether a folder has a chat template, in a file of its own or in the tokenizer's configuration; True without such a configuration."""
    if any((folder / name).exists() for name in _TEMPLATES) or not (folder / _TOKENIZER).is_file():
        return True
    return bool(_tokenizer(folder).get("chat_template"))


def _tokenizer(folder: Path) -> dict[str, Any]:
    return read_json(folder / _TOKENIZER) if (folder / _TOKENIZER).is_file() else {}


def _template(folder: Path) -> str:
    """Return the text of a folder's chat template; empty if it has none, or several."""
    text, listed = folder / _TEMPLATES[0], folder / _TEMPLATES[1]
    if text.is_file():
        return text.read_text(encoding="utf-8", errors="replace")
    found = (read_json(listed) if listed.is_file() else _tokenizer(folder)).get("chat_template")
    return found if isinstance(found, str) else ""


def _tokens(folder: Path) -> frozenset[str] | None:
    """Return the added tokens of a folder's tokenizer; None if its configuration does not list them."""
    added = _tokenizer(folder).get("added_tokens_decoder")
    return frozenset(str(one["content"]) for one in added.values()) if isinstance(added, dict) else None


def _cached_values(settings: dict[str, Any]) -> int:
    """Return keys and values of a token in all layers, or the compressed ones of multi-head latent attention.

    Layers with a sliding window count in full, so the result is an upper bound for them.
    """
    layers = settings.get("layer_types") or ["full_attention"] * _size(settings, "num_hidden_layers")
    if any(str(kind) not in ("full_attention", "sliding_attention") for kind in layers):
        return 0
    if compressed := _size(settings, "kv_lora_rank"):
        return len(layers) * (compressed + _size(settings, "qk_rope_head_dim"))
    heads = _size(settings, "num_attention_heads")
    width = _size(settings, "head_dim") or _size(settings, "hidden_size") // max(1, heads)
    return 2 * len(layers) * (_size(settings, "num_key_value_heads") or heads) * width


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _linear_layers(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return all matrices except embeddings, head, routers and experts, by the last part of their modules' names."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, shape in shapes.items():
        module = key.removesuffix(_WEIGHT)
        if key.endswith(_WEIGHT) and len(shape) == 2 and is_adaptable(module):
            found.setdefault(module.rpartition(".")[2], []).append((shape[0], shape[1]))
    return {name: tuple(found[name]) for name in sorted(found)}

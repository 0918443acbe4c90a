"""What makes a base model unusable although its files can be read: found from config.json, headers and samples of values.

Loaders fill missing tensors with random values, and an engine reports the consequence a minute later as another error.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marlaas.models.errors import NotAModel
from marlaas.models.weight_files import Tensor, read_json, refuse_pointer, sample

_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks)\.)(\d+)\.(.+)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")


def refuse_damaged(folder: Path, config: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Check a model's folder.

    Args:
        config: config.json.
        tensors: of the weight files.

    Raises:
        NotAModel: with the first problem, which names the file.
    """
    problem = next(_problems(folder, config, tensors), None)
    if problem is not None:
        raise NotAModel(f"no base model in {folder}: {problem}")


def _problems(folder: Path, config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    text = config.get("text_config")
    settings = text if isinstance(text, dict) else config
    yield from _unusual(folder, config)
    yield from _tokenizer(folder)
    yield from _missing(settings, [one for one in tensors if len(one.shape) > 1])
    yield from _wrong_vocabulary(settings, tensors)
    yield from _wrong_values([one for one in tensors if len(one.shape) > 1])


def _unusual(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    if "quantization_config" in config:
        given = config["quantization_config"]
        method = given.get("quant_method", "unknown") if isinstance(given, dict) else given
        yield f"its weights are quantised ({method}), and a trainer needs float32 or bfloat16; choose the checkpoint that is not quantised"
    if "auto_map" in config and not _is_known(str(config.get("model_type", ""))):
        yield (
            f"model_type {config.get('model_type')!r} needs code of the model's own (auto_map in config.json), which is never run; "
            "choose a model that the library transformers knows"
        )
    if (folder / "adapter_config.json").is_file():
        yield (
            "adapter_config.json lies beside the weights, so loaders take the folder for an adapter of another model; remove it, "
            "or name the adapter in a job's `initFrom`"
        )


def _is_known(model_type: str) -> bool:
    """Whether transformers has a module for a type of model; true if transformers is not installed here."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return True
    return (Path(spec.origin).parent / "models" / model_type.replace("-", "_")).is_dir()


def _tokenizer(folder: Path) -> Iterator[str]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    refuse_pointer(folder / "tokenizer.model")
    yield from ()


def _missing(settings: Mapping[str, Any], matrices: Sequence[Tensor]) -> Iterator[str]:
    """Yield layers that are missing, and matrices that a layer lacks and another one has."""
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in matrices:
        if found := _LAYER.match(one.name):
            layers[found[1]][int(found[2])].add(found[3])
    if not layers:
        return
    prefix, main = max(layers.items(), key=lambda item: len(item[1]))
    num_layers = settings.get("num_hidden_layers")
    if isinstance(num_layers, int) and len(main) < num_layers:
        absent = min(set(range(num_layers)) - set(main), default=len(main))
        yield f"its weight files hold {len(main)} of {num_layers} layers ({prefix}{absent} is missing); the download may be incomplete"
    if _has_different_layers(settings):
        return
    last = num_layers if isinstance(num_layers, int) else len(main)  # a layer after it predicts further tokens
    own = {at: names for at, names in sorted(main.items()) if at < last}
    for at, names in own.items():
        fuller = next((other for other in own.values() if names < other), None)
        if fuller is not None:
            yield f"its weight files lack {prefix}{at}.{min(fuller - names)}; the download may be incomplete"


def _has_different_layers(settings: Mapping[str, Any]) -> bool:
    """Whether layers of the model may have different weights: by a setting of each layer, or because some share keys and values."""
    num_layers = settings.get("num_hidden_layers")
    by_layer = any(isinstance(value, list) and len(value) == num_layers for value in settings.values())
    return by_layer or bool(settings.get("num_kv_shared_layers") or settings.get("use_cla"))


def _wrong_vocabulary(settings: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[str]:
    wanted = settings.get("vocab_size")
    embeddings = [one for one in tensors if _EMBEDDING.search(one.name)]
    for one in embeddings[:1]:
        if isinstance(wanted, int) and one.shape[0] != wanted:
            yield f"{one.file.name} has {one.shape[0]} rows in {one.name}, and config.json says vocab_size {wanted}; they must be equal"


def _wrong_values(matrices: Sequence[Tensor]) -> Iterator[str]:
    num_zero = num_sampled = 0
    for one in matrices:
        found = sample(one)
        if found is None:
            continue
        if not found.is_finite:
            yield f"{one.name} in {one.file.name} holds values that are not finite (NaN)"
        num_zero += found.is_zero
        num_sampled += 1
    if num_sampled and num_zero > num_sampled // 2:
        yield f"{num_zero} of {num_sampled} matrices in {matrices[0].file.name} hold only zeros; the download may be incomplete"

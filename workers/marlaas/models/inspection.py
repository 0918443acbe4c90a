"""Facts about a model's folder, read from config.json and the headers of the safetensors files, without loading weights.

Standard library only, and takes a few milliseconds, because `marlaas validate` uses it.
"""

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.models.errors import NotAModel

_NOT_ADAPTED = re.compile(r"embed|head$|experts|router|\bgate$|\bwte$|\bwpe$")
_LARGEST_HEADER = 100 * 2**20
_WEIGHT = ".weight"


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
    """

    architectures: tuple[str, ...]
    num_parameters: int
    linear_layers: dict[str, tuple[tuple[int, int], ...]]
    max_positions: int | None
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0

    def adapter_parameters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Return the number of values in an adapter of these linear layers (empty: all): A [rank, in] and B [out, rank] for each."""
        chosen = [shapes for name, shapes in self.linear_layers.items() if not targets or name in targets]
        return sum(rank * (out + into) for shapes in chosen for out, into in shapes)


def inspect(folder: Path) -> ModelFacts:
    """Inspect a folder in Hugging Face format.

    Raises:
        NotAModel: config.json or a header cannot be read, or no weights are in safetensors format.
    """
    config = _json(folder / "config.json")
    text = config.get("text_config")
    shapes = dict(_shapes(folder))
    settings = text if isinstance(text, dict) else config
    positions = settings.get("max_position_embeddings")
    return ModelFacts(
        architectures=tuple(str(name) for name in config.get("architectures") or ()),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        linear_layers=_linear_layers(shapes),
        max_positions=positions if isinstance(positions, int) else None,
        vocab_size=_size(settings, "vocab_size"),
        hidden_size=_size(settings, "hidden_size"),
        num_layers=_size(settings, "num_hidden_layers"),
    )


def _size(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _linear_layers(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return all matrices except embeddings, head, routers and experts, by the last part of their modules' names."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, shape in shapes.items():
        module = key.removesuffix(_WEIGHT)
        if key.endswith(_WEIGHT) and len(shape) == 2 and not _NOT_ADAPTED.search(module):
            found.setdefault(module.rpartition(".")[2], []).append((shape[0], shape[1]))
    return {name: tuple(found[name]) for name in sorted(found)}


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in _files(folder):
        for key, entry in _header(file).items():
            if key != "__metadata__":
                yield key, tuple(int(size) for size in entry["shape"])


def _files(folder: Path) -> list[Path]:
    """Return the weight files: those of the index, else model.safetensors, else all safetensors files.

    A folder may hold a second copy of the weights under other names. Raises NotAModel if there are none.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_json(index).get("weight_map", {}).values()))]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotAModel(
            f"no base model in {folder}: its weights are not in safetensors format, the only supported format"
        )
    return files


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 0 < length <= _LARGEST_HEADER else None
    except FileNotFoundError:
        raise NotAModel(
            f"no base model in {file.parent}: {file.name} is missing; the download may be incomplete"
        ) from None
    except (OSError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise NotAModel(f"no base model in {file.parent}: {file.name} is damaged: it has no safetensors header")
    return header


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAModel(f"no base model in {file.parent}: {file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise NotAModel(f"no base model in {file.parent}: {file.name} is not a JSON object")
    return found

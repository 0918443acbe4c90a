"""Errors of base models. Each text tells the user what to do."""

from marlaas_api.errors import InvalidInput


class ModelError(InvalidInput):
    """A base model cannot be brought onto this machine's disk."""


class UnknownModel(ModelError):
    """There is no model of that name, here or on the hub."""


class NotAModel(ModelError):
    """A model's folder or one of its required files is missing."""


class MissingWeights(ModelError):
    """The Python package with a builtin model's weights is missing or has the wrong version."""


class MissingPackage(ModelError):
    """A Python package that is needed to fetch or build a model is not installed."""

    def __init__(self, what: str, error: ImportError) -> None:
        package = (error.name or "").partition(".")[0]
        why = f"the Python package {package} is not installed" if package else str(error).strip()
        super().__init__(f"{what}: {why}; install MARLaaS with its extra cpu or gpu: pip install 'marlaas[cpu]'")


class CacheUnusable(ModelError):
    """The cache folder cannot be written."""


class CacheFull(ModelError):
    """The disk of the cache folder has no room for the model."""


class HubUnavailable(ModelError):
    """The hub does not answer, and the model was not fetched before."""


class UploadRefused(ModelError):
    """The hub does not take an upload to this repository."""

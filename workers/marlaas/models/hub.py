"""The gateway to the Hugging Face hub."""

from pathlib import Path

from marlaas.models.errors import HubUnavailable, UnknownModel

_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]


def fetch(repository: str, revision: str) -> Path:
    """Return the folder of a hub model, after downloading what the hub's own cache does not have.

    Raises:
        UnknownModel: the hub has no such repository or revision, or does not show it to us.
        HubUnavailable: the hub does not answer, and the files are not in its cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.errors import RevisionNotFoundError as NoRevision

    name = f"{repository}@{revision}"
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))
    except (RepositoryNotFoundError, NoRevision) as error:
        raise UnknownModel(
            f"the hub has no model {name}, or it is gated: check the name, or set HF_TOKEN to a token that may read it"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise HubUnavailable(
            f"the hub does not give model {name}, and it is not in the cache: connect this machine, or give a folder (path) "
            "or a builtin model"
        ) from error

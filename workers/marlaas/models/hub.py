"""Gateway to the Hugging Face hub: downloads, the hub's local cache, and errors as sentences."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from marlaas.models.errors import CacheFull, CacheUnusable, HubUnavailable, MissingPackage, ModelError, UnknownModel

ATTEMPTS = 4
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
_FIRST_PAUSE_S = 1.0
_LATER = {408, 425, 429, 500, 502, 503, 504}


def fetch(repository: str, revision: str, pause: Callable[[float], None] = time.sleep) -> Path:
    """Return the folder of a hub model, after downloading files that the hub's own cache lacks.

    Transient errors are retried up to `ATTEMPTS` times in total, with pauses of 1, 2 and 4 seconds. An interrupted
    download resumes.

    Raises:
        UnknownModel: the hub has no such repository or revision, or denies access to it.
        HubUnavailable: the hub does not answer, and the files are not in its cache.
        CacheUnusable, CacheFull: the hub's cache on this machine cannot be written, or its disk is full.
        MissingPackage: the hub's client is not installed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _download(repository, revision)
        except ImportError as error:
            raise MissingPackage(f"model {repository}@{revision} cannot be fetched", error) from error
        except Exception as error:
            if attempt == ATTEMPTS or not _may_pass(error):
                raise _explained(error, f"{repository}@{revision}", attempt) from error
            pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def cached(repository: str, revision: str) -> Path | None:
    """Return the cached folder of a hub model, which may be incomplete; None if it was never fetched. Makes no request."""
    if not (_cache() / f"models--{repository.replace('/', '--')}").is_dir():
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _download(repository: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed. Definite answers of the hub and errors of the disk are not retried."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if is_offline() or isinstance(error, RepositoryNotFoundError | RevisionNotFoundError):
        return False
    status = status_of(error)
    return status in _LATER if status is not None else disk_error(error) is None


def _explained(error: Exception, name: str, attempts: int) -> Exception:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return UnknownModel(f"model {name} is gated on the hub: accept its terms on its page, then {token_wanted()}")
    if isinstance(error, RevisionNotFoundError):
        return UnknownModel(f"the hub has no revision {name}; give a branch, a tag or a commit of the model")
    if isinstance(error, RepositoryNotFoundError) or status_of(error) in (401, 403):
        return UnknownModel(
            f"the hub has no model {name}, or denies access to it: check the name, and if the model is private, {token_wanted()}"
        )
    on_disk = disk_error(error)
    if on_disk is not None:
        return on_disk
    return _unreachable(error, name, attempts)


def _unreachable(error: Exception, name: str, attempts: int) -> ModelError:
    otherwise = "or use a folder (path) or a builtin model"
    if is_offline():
        return HubUnavailable(
            f"model {name} is not in the hub's cache {_cache()}, and HF_HUB_OFFLINE forbids downloads: unset it and connect this "
            f"machine to the network, copy the cache from another machine, {otherwise}"
        )
    status = status_of(error)
    why = f"it answers {status}" if status is not None else "it does not answer"
    return HubUnavailable(
        f"model {name} cannot be fetched from the hub ({why}, after {attempts} attempts) and is not in the cache {_cache()}: "
        f"connect this machine to the network, set HF_ENDPOINT to a hub that it can reach, {otherwise}"
    )


def token_wanted() -> str:
    """Return what to do about a token that is missing or may not read."""
    if os.environ.get("HF_TOKEN"):
        return "set HF_TOKEN to a token that may read it; the current token may not"
    return "set HF_TOKEN to a token that may read it"


def disk_error(error: BaseException | None) -> ModelError | None:
    """Return the disk error in the chain of causes as a ModelError; None if there is none."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT):
            return CacheFull(
                f"the disk of the hub's cache {_cache()} is full: free space, or set HF_HOME to a folder on another disk"
            )
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            return CacheUnusable(
                f"cannot write into the hub's cache {_cache()}: set HF_HOME to a folder that can be written"
            )
        error = error.__cause__ or error.__context__
    return None


def status_of(error: BaseException | None) -> int | None:
    """Return the hub's HTTP status in the chain of causes; None if there is none."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids downloads."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cache() -> Path:
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"

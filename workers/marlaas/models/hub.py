"""Gateway to the Hugging Face hub: downloads, uploads, the hub's local cache, and errors as sentences."""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from marlaas.models.errors import (
    CacheFull,
    CacheUnusable,
    HubUnavailable,
    MissingPackage,
    ModelError,
    UnknownModel,
    UploadRefused,
)

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


def upload(
    repository: str, files: Mapping[str, Path | bytes], *, is_private: bool, pause: Callable[[float], None] = time.sleep
) -> str:
    """Write files into a hub repository of a model in one commit, and return its address. Makes the repository if it does not exist.

    Transient errors are retried as in `fetch`; a commit that a lost answer made twice has no further effect. files: by their name.

    Raises:
        UploadRefused: the token may not write to the repository, or its name is not OWNER/NAME.
        HubUnavailable: the hub does not answer.
        MissingPackage: the hub's client is not installed.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _upload(repository, files, is_private)
        except ImportError as error:
            raise MissingPackage(f"{repository} cannot be written", error) from error
        except Exception as error:
            if attempt == ATTEMPTS or not _may_be_written(error):
                raise _refused(error, repository, attempt) from error
            pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def require_token() -> None:
    """Check that an upload can be tried. Raises UploadRefused without a token, HubUnavailable if uploads are forbidden, MissingPackage."""
    try:
        from huggingface_hub import get_token
    except ImportError as error:
        raise MissingPackage("nothing can be uploaded to the hub", error) from error
    if is_offline():
        raise HubUnavailable("HF_HUB_OFFLINE forbids uploads; unset it")
    if get_token() is None:
        raise UploadRefused("set HF_TOKEN to a token of the hub that may write, or run `hf auth login`")


def check_repository(repository: str) -> None:
    """Raise UploadRefused if the hub takes no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UploadRefused(f"{repository} is no name that the hub takes: {error}") from error


def _upload(repository: str, files: Mapping[str, Path | bytes], is_private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    api.create_repo(repository, private=is_private, exist_ok=True)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    api.create_commit(repository, operations, commit_message="Adapter trained with MARLaaS")
    return f"{api.endpoint}/{repository}"


def _may_be_written(error: Exception) -> bool:
    """Return whether a retry of an upload may succeed: the hub gave no answer, or one that it may not give again."""
    status = status_of(error)
    return status in _LATER if status is not None else not (is_offline() or isinstance(error, ValueError))


def _refused(error: Exception, repository: str, attempts: int) -> ModelError:
    status = status_of(error)
    if isinstance(error, ValueError) and status is None:
        return UploadRefused(f"{repository} is no name of a repository: give OWNER/NAME ({error})")
    if status in (401, 403):
        return UploadRefused(
            f"the hub does not let this token write to {repository}: check the owner, then run `hf auth login` or set HF_TOKEN to a token that may write"
        )
    if status is not None and status not in _LATER:
        return UploadRefused(f"the hub refuses {repository} ({status}): {error}")
    if is_offline():
        return HubUnavailable(f"{repository} cannot be written: HF_HUB_OFFLINE forbids it; unset it")
    why = f"it answers {status}" if status is not None else "it does not answer"
    return HubUnavailable(
        f"{repository} cannot be written ({why}, after {attempts} attempts): connect this machine to the network, or set HF_ENDPOINT to a hub "
        "that it can reach"
    )


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

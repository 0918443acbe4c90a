"""Gateway to data sets of the Hugging Face hub: its local cache first, then a download, and which files are a split."""

import contextlib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from marlaas.envs.dataset.files import SUFFIXES
from marlaas.envs.dataset.problems import InvalidArgument, SourceSilent, SourceUnavailable
from marlaas.envs.dataset.settings import Source
from marlaas.models.hub import disk_error, is_offline, status_of, token_wanted

_README, _MAIN = "README.md", "main"


def split_files(source: Source, *loc: str | int) -> tuple[list[str], str]:
    """Return the files of a split, and the commit of the data set. Other splits are not downloaded.

    loc: of the source below `args`. Raises InvalidArgument: the data set or the split cannot be found; SourceUnavailable: the hub
    refuses, or (SourceSilent) does not answer.
    """
    folder = _folder(source, [_README], *loc)
    patterns = _patterns(folder, source)
    if patterns:
        folder = _folder(source, patterns, *loc)
    found = _matching(folder, patterns)
    if not found:
        raise InvalidArgument(
            f"data set {source.hub} has no files {', '.join(SUFFIXES)} of config {source.config or 'default'!r} and split {_name(source)!r}; "
            f"it has {', '.join(sorted(_configs(folder))) or 'no configs in its README.md'}",
            *loc,
        )
    return [str(folder / one) for one in found], folder.name


def _folder(source: Source, patterns: Sequence[str], *loc: str | int) -> Path:
    """Return the data set's folder with these files. No request is made if the cache has all of them: the client knows which there are."""
    try:
        from huggingface_hub import close_session, snapshot_download
    except ImportError as error:
        raise InvalidArgument(
            f"a data set of the hub needs the Python package {error.name}: pip install 'marlaas[worker]'", *loc
        ) from None
    name, revision = str(source.hub), source.revision or _MAIN
    download = partial(snapshot_download, name, repo_type="dataset", revision=revision, allow_patterns=list(patterns))
    with contextlib.suppress(OSError, ValueError):  # files were never fetched
        return Path(download(local_files_only=True))
    try:
        return Path(download())
    except Exception as error:
        raise _explained(error, source, *loc) from None
    finally:
        close_session()  # episodes are forked from this process, and would share its connections


def _explained(error: Exception, source: Source, *loc: str | int) -> InvalidArgument:
    """Return an error of the hub's client, which has repeated what may pass, as a sentence."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    name, revision, status = f"data set {source.hub}", source.revision or _MAIN, status_of(error)
    if isinstance(error, GatedRepoError):
        gated = f"{name} is gated on the hub: accept its terms on its page, then {token_wanted()}"
        return SourceUnavailable(gated, *loc)
    if isinstance(error, RevisionNotFoundError):
        return InvalidArgument(
            f"{name} has no revision {revision!r} on the hub; give a branch, a tag or a commit", *loc
        )
    if isinstance(error, RepositoryNotFoundError) and status == 404:
        return InvalidArgument(f"the hub has no {name}: check the name, and if it is private, {token_wanted()}", *loc)
    if status in (401, 403):
        refused = f"the hub denies access to {name}, or has none of this name (it answers {status})"
        return SourceUnavailable(f"{refused}: check the name, and {token_wanted()}", *loc)
    if (on_disk := disk_error(error)) is not None:
        return InvalidArgument(str(on_disk), *loc)
    text = f"{name} at revision {revision!r} is not in the hub's cache and cannot be fetched"
    if is_offline():
        how = "HF_HUB_OFFLINE forbids downloads: unset it, or copy the cache of another machine"
        return InvalidArgument(f"{text}, because {how}", *loc)
    why = f"answers {status}" if status is not None else "does not answer"
    how = "connect this machine to the network, or set HF_ENDPOINT to a hub that it can reach"
    more = "in a cluster, environment.egress must allow it"
    return SourceSilent(f"{text}: the hub {why}; {how}; {more}", *loc)


def _name(source: Source) -> str:
    return source.split or "train"


def _patterns(folder: Path, source: Source) -> list[str]:
    """Return the patterns of a split's files, as the README's `configs` say, or by the names that the hub expects."""
    split = _name(source)
    if configs := _configs(folder):
        return configs.get(source.config or next(iter(configs)), {}).get(split, [])
    begin = f"{source.config}/" if source.config else ""
    return [f"{begin}{name}" for name in (f"{split}-*", f"{split}.*", f"data/{split}-*", f"data/{split}.*")]


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [one for one in files if any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns)]


def _configs(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the patterns of files by config and split, from the front matter of the README."""
    readme = folder / _README
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        front = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        front = None
    configs = front.get("configs") if isinstance(front, dict) else None
    return {str(one["config_name"]): dict(_splits(one)) for one in configs or () if "data_files" in one}


def _splits(config: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    given = config["data_files"]
    for one in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        if isinstance(one, dict):
            paths = one.get("path", [])
            yield str(one.get("split", "train")), [paths] if isinstance(paths, str) else list(paths)
        else:
            yield "train", [str(one)]

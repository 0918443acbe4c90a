"""Gateway to data sets of the Hugging Face hub: its local cache first, then a download, and which files are a split."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from marlaas.envs.dataset.files import SUFFIXES
from marlaas.envs.dataset.problems import InvalidArgument
from marlaas.envs.dataset.settings import Source

_README, _MAIN = "README.md", "main"


def split_files(source: Source, *loc: str | int) -> tuple[list[str], str]:
    """Return the files of a split, and the commit of the data set. Other splits are not downloaded.

    loc: of the source below `args`. Raises InvalidArgument: the data set or the split cannot be found.
    """
    folder = _folder(source, [_README], *loc)
    patterns = _patterns(folder, source)
    if patterns and not (found := _matching(folder, patterns)):
        folder = _folder(source, patterns, *loc, from_cache=False)
        found = _matching(folder, patterns)
    if not patterns or not found:
        raise InvalidArgument(
            f"data set {source.hub} has no files {', '.join(SUFFIXES)} of config {source.config or 'default'!r} and split {_name(source)!r}; "
            f"it has {', '.join(sorted(_configs(folder))) or 'no configs in its README.md'}",
            *loc,
        )
    return [str(folder / one) for one in found], folder.name


def _folder(source: Source, patterns: Sequence[str], *loc: str | int, from_cache: bool = True) -> Path:
    """Return the data set's folder with these files. from_cache: make no request if the cache has the data set."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InvalidArgument(
            f"a data set of the hub needs the Python package {error.name}: pip install 'marlaas[worker]'", *loc
        ) from None
    name, revision = str(source.hub), source.revision or _MAIN
    if from_cache:
        try:
            return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
        except (OSError, ValueError):
            pass  # it was never fetched
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        text = " ".join(str(error).split())
        raise InvalidArgument(
            f"data set {source.hub} at revision {revision!r} is not in the hub's cache and cannot be fetched: {text:.300}",
            *loc,
        ) from None


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

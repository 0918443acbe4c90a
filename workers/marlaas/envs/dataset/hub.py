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

_PATTERNS = ["README.md", *(f"**{suffix}{end}" for suffix in SUFFIXES for end in ("", ".gz"))]
_MAIN = "main"


def split_files(source: Source, *loc: str | int) -> tuple[list[str], str]:
    """Return the files of a split, and the commit of the data set.

    loc: of the source below `args`. Raises InvalidArgument: the data set or the split cannot be found.
    """
    folder = _folder(source, *loc)
    if not (found := _split(folder, source)):
        folder = _folder(source, *loc, is_complete=False)
        found = _split(folder, source)
    if not found:
        raise InvalidArgument(
            f"data set {source.hub} has no files {', '.join(SUFFIXES)} of config {source.config or 'default'!r} and split {_name(source)!r}; "
            f"it has {', '.join(sorted(_configs(folder))) or 'no configs in its README.md'}",
            *loc,
        )
    return [str(folder / one) for one in found], folder.name


def _folder(source: Source, *loc: str | int, is_complete: bool = True) -> Path:
    """Return the data set's folder. is_complete: take what the cache has, without a request, if it has the data set."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InvalidArgument(
            f"source.hub needs the Python package {error.name}: pip install 'marlaas[worker]'", *loc
        ) from None
    wanted: dict[str, Any] = {
        "repo_id": source.hub,
        "repo_type": "dataset",
        "revision": source.revision or _MAIN,
        "allow_patterns": _PATTERNS,
    }
    if is_complete:
        try:
            return Path(snapshot_download(**wanted, local_files_only=True))
        except (OSError, ValueError):
            pass  # it was never fetched
    try:
        return Path(snapshot_download(**wanted))
    except Exception as error:
        text = " ".join(str(error).split())
        raise InvalidArgument(
            f"data set {source.hub} at revision {source.revision or _MAIN!r} is not in the hub's cache and cannot be fetched: {text:.300}",
            *loc,
        ) from None


def _name(source: Source) -> str:
    return source.split or "train"


def _split(folder: Path, source: Source) -> list[str]:
    """Return the files of a split, as the README's `configs` say, or by the names that the hub expects."""
    split = _name(source)
    files = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != "README.md"
    )
    configs = _configs(folder)
    if configs:
        patterns = configs.get(source.config or next(iter(configs)), {}).get(split, [])
    else:
        begin = f"{source.config}/" if source.config else ""
        patterns = [f"{begin}{name}" for name in (f"{split}-*", f"{split}.*", f"data/{split}-*", f"data/{split}.*")]
    return [one for one in files if any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns)]


def _configs(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the patterns of files by config and split, from the front matter of the README."""
    readme = folder / "README.md"
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

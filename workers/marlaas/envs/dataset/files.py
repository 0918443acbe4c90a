"""The files of a source: found by pattern, identified by the SHA-256 of their content."""

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlaas.envs.dataset.problems import InvalidArgument
from marlaas.models.cache import cache_folder

MOUNTED = "MARLAAS_DATA"
SUFFIXES = (".jsonl", ".csv", ".parquet")
_LARGE_BYTES = 16 << 20
_STAMP = "stamps"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a source. suffix: its kind, without `.gz`. url: address of the object that it was downloaded from; empty: a local file."""

    path: Path
    suffix: str
    is_gzip: bool
    url: str = ""

    @property
    def origin(self) -> str:
        """Where the content comes from: a URL, or an absolute path."""
        return self.url or str(self.path)

    def __str__(self) -> str:
        """The origin for people: a path is relative if it is below the working directory."""
        if self.url:
            return self.url
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)


def find(patterns: Sequence[str], *loc: str | int) -> tuple[DataFile, ...]:
    """Return the files of patterns, in the order of the patterns and then of names.

    loc: of the patterns below `args`. Raises InvalidArgument: no file matches, or one is of an unknown kind.
    """
    found: dict[Path, DataFile] = {}
    for pattern in patterns:
        given = _located(os.path.expanduser(pattern))  # noqa: PTH111
        paths = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))  # noqa: PTH110, PTH207
        files = [path for one in paths if (path := Path(one).absolute()).is_file()]
        if not files:
            raise InvalidArgument(f"no file matches {Path(given).absolute()}", *loc)
        for path in files:
            found.setdefault(path, data_file(path, *loc))
    return tuple(found.values())


def _located(pattern: str) -> str:
    """Return a pattern below the folder of the job's volumes, if it is relative and something matches there.

    MARLAAS_DATA names that folder in a cluster; on a machine, the working directory is the manifest's folder.
    """
    mounted = os.path.join(os.environ.get(MOUNTED, ""), pattern)  # noqa: PTH118
    return mounted if glob.glob(mounted, recursive=True) else pattern  # noqa: PTH207


def data_file(path: Path, *loc: str | int, url: str = "") -> DataFile:
    """Return a file as one of a source. url: see `DataFile`. Raises InvalidArgument: it is of an unknown kind."""
    is_gzip = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if is_gzip else path.suffix
    if suffix not in SUFFIXES or (is_gzip and suffix == ".parquet"):
        raise InvalidArgument(
            f"{url or path} is not {', '.join(SUFFIXES)}, {', '.join(f'{s}.gz' for s in SUFFIXES[:2])}", *loc
        )
    return DataFile(path, suffix, is_gzip, url)


def digest(file: DataFile) -> str:
    """Return the SHA-256 of a file's content. That of a large file is kept in the cache by its path, size and times."""
    status = file.path.stat()
    if status.st_size < _LARGE_BYTES:
        return _computed(file.path)
    stamp = f"{file.path} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    kept = cache_folder() / "datasets" / _STAMP / hashlib.sha256(os.fsencode(stamp)).hexdigest()[:32]
    try:
        return kept.read_text(encoding="ascii")
    except OSError:
        found = _computed(file.path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f".{kept.name}.{os.getpid()}")
        partial.write_text(found, encoding="ascii")
        partial.replace(kept)
    except OSError:
        pass  # a cache that cannot be written: the digest is computed again next time
    return found


def _computed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

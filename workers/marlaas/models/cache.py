"""Folders that are built once and then never change: what is visible is whole.

Invariant: a folder appears under its name by one rename, of a folder that was finished; whoever builds holds the name's file
lock, so of several processes one builds and the others wait and use its work. A build that was killed leaves a folder that
nobody reads and that the next build removes. Knows nothing of models.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from marlaas.models.errors import CacheFull, CacheUnusable

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
_MIB = 2**20


def cache_folder() -> Path:
    """Return `$MARLAAS_CACHE`, or `marlaas` in the user's cache folder."""
    own = os.environ.get("MARLAAS_CACHE")
    return Path(own).expanduser().absolute() if own else _user_cache() / "marlaas"


def build_once(target: Path, build: Callable[[Path], None], needed_bytes: int) -> Path:
    """Return `target`, after `build` has filled it if it was not there; `build` is given an empty folder.

    Raises:
        CacheUnusable: the folder around it cannot be written.
        CacheFull: there are fewer than `needed_bytes` on the disk, or it was full before the build was done.
        Exception: what `build` raised; nothing is left of its work.
    """
    if target.is_dir():
        return target
    with _explained(target.parent, needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not target.is_dir():
                _build(target, build, needed_bytes)
    return target


def _build(target: Path, build: Callable[[Path], None], needed_bytes: int) -> None:
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    if shutil.disk_usage(target.parent).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    partial.mkdir()
    try:
        build(partial)
        _seal(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Bring every file to the disk, readable by everyone who may read the cache: some libraries write theirs as 0600."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel releases it however the process ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(folder: Path, needed_bytes: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if _is_full(error):
            raise CacheFull(
                f"no room in {folder}: {needed_bytes / _MIB:.0f} MiB are needed; free some, or set MARLAAS_CACHE to a "
                "folder on another disk"
            ) from error
        if isinstance(error, OSError) and error.errno in _FORBIDDEN:
            raise CacheUnusable(
                f"cannot write into the cache {folder}: {error.strerror}; set MARLAAS_CACHE to a folder that can be written"
            ) from error
        raise


def _is_full(error: Exception) -> bool:
    """Say whether the disk is full; the library that writes weights tells it in words only."""
    return (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()

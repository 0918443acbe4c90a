"""Cache of folders that are built once and never change; every visible folder is complete.

Invariant: a finished folder gets its name by one rename. The builder holds the file lock of that name, so one
process builds and the others wait for its result. The next build removes the unnamed folder of a killed build.
Independent of models.
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
    """Return `target`; if it does not exist, let `build` fill an empty folder first.

    Raises:
        CacheUnusable: the parent folder cannot be written.
        CacheFull: fewer than `needed_bytes` are free on the disk, or it became full during the build.
        Exception: an exception of `build`; its files are removed.
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
    """Flush every file to disk and make it world-readable, because some libraries create files with mode 0600."""
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
    """Hold a file lock. The kernel releases it when the process exits for any reason."""
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
                f"the disk of {folder} is full: {needed_bytes / _MIB:.0f} MiB are needed; free space, or set MARLAAS_CACHE to a "
                "folder on another disk"
            ) from error
        if isinstance(error, OSError) and error.errno in _FORBIDDEN:
            raise CacheUnusable(
                f"cannot write into the cache {folder}: {error.strerror}; set MARLAAS_CACHE to a folder that can be written"
            ) from error
        raise


def _is_full(error: Exception) -> bool:
    """Return whether the disk is full. The library that writes weights reports that in the error's text only."""
    return (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()

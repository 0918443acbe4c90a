"""Output folder of a run: its layout, its lock, and atomic writes (temporary file and rename).

Layout: `summary.json` and `<namespace>/<name>/…` for users; `.state/` for the runner (record of the run, NATS
store, blobs, logs).
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, PoolDocument, Progress
from marlaas_api.names import JobRef

MIN_FREE_BYTES = 256 << 20
"""Required free disk: a run of the smallest job writes about this much (NATS store, adapters, logs)."""
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 5, 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class ModuleFile(BaseModel):
    """File of an environment's module or data set, and the SHA-256 of its content. Modules that it imports are not part of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    sha256: str


class RunRecord(BaseModel):
    """Record of the run in `.state/run.json`, written before anything is started, and again at the end of a run.

    cancelled: documents of cancelled jobs, which a later run deletes from the bus if this one was killed before it did.
    progress: last published progress of the jobs. finished: all jobs are settled.
    modules: by job key, the environment's module that the job plays; images and most builtins have none. data: by job key, the files
    of its data set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    jobs: tuple[JobDocument, ...] = ()
    pools: tuple[PoolDocument, ...] = ()
    cancelled: tuple[JobDocument, ...] = ()
    progress: tuple[Progress, ...] = ()
    finished: bool = False
    modules: dict[str, ModuleFile] = {}
    data: dict[str, tuple[ModuleFile, ...]] = {}


@dataclass(frozen=True, slots=True)
class OutFolder:
    """Paths and files of one output folder. Use `hold` to get one."""

    root: Path

    @property
    def state(self) -> Path:
        """Folder that only the runner uses."""
        return self.root / ".state"

    @property
    def nats_store(self) -> Path:
        """Folder of the embedded NATS server."""
        return self.state / "nats"

    @property
    def blobs(self) -> Path:
        """Folder of the blob store."""
        return self.state / "blobs"

    @property
    def logs(self) -> Path:
        """Logs of the roles that serve all jobs."""
        return self.state / "logs"

    @property
    def scratch(self) -> Path:
        """Scratch folders of the roles."""
        return self.state / "scratch"

    @property
    def documents(self) -> Path:
        """Pool and job documents that roles are started with."""
        return self.state / "documents"

    @property
    def changes(self) -> Path:
        """Changes that commands ask for while the run goes on, and the runner's answers."""
        return self.state / "changes"

    @property
    def piped(self) -> Path:
        """Copy of the manifest that the run has read from a pipe; the command that continues the run reads it."""
        return self.state / "manifest.yaml"

    @property
    def summary(self) -> Path:
        """The result as JSON."""
        return self.root / "summary.json"

    def job(self, ref: JobRef) -> Path:
        """Return the folder of one job's output files."""
        return self.root / ref.namespace / ref.name

    def read_record(self) -> RunRecord:
        """Return the record of earlier runs; empty for a new folder. Raises InvalidInput if the file cannot be parsed."""
        path = self.state / "run.json"
        try:
            return RunRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return RunRecord()
        except ValidationError as error:
            raise InvalidInput(
                f"{path} is not a record of this version of marlaas ({error.error_count()} errors): choose another --out"
            ) from error

    def write_record(self, record: RunRecord) -> None:
        """Replace the record. Raises InvalidInput if the folder cannot be written."""
        write(self.state / "run.json", record.model_dump_json(indent=1).encode())

    def link_logs(self, ref: JobRef) -> None:
        """Link the logs of the roles that serve all jobs into the job's own folder, if its file system has symbolic links."""
        folder = self.job(ref) / "logs"
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = {one.name for one in folder.iterdir()}
            for log in self.logs.glob("*.log"):
                if log.name not in known:
                    _link(folder / log.name, os.path.relpath(log, folder))


@contextlib.contextmanager
def hold(root: Path) -> Iterator[OutFolder]:
    """Create the folder and lock it against every other `marlaas run` while the context is open.

    Raises:
        InvalidInput: the path cannot be used (unwritable, not a folder, nearly full), or another run holds the lock.
    """
    folder = OutFolder(root.absolute())
    _make(folder, root)
    with translated(folder.root):
        lock = (folder.state / "lock").open("a+")
    with lock:
        _take(lock, root)
        yield folder


def _make(folder: OutFolder, root: Path) -> None:
    with translated(folder.root):
        for path in (
            folder.state,
            folder.logs,
            folder.scratch,
            folder.documents,
            folder.blobs,
            folder.nats_store,
            folder.changes,
        ):
            path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.state).free
    if free < MIN_FREE_BYTES:
        raise InvalidInput(
            f"--out {root}: only {free >> 20} MiB are free, and a run needs at least {MIN_FREE_BYTES >> 20} MiB: "
            "free space, or choose another --out"
        )


def _take(lock: IO[str], root: Path) -> None:
    """Lock the file while it is open. The operating system releases the lock when this process exits for any reason."""
    if not _locked(lock):
        lock.seek(0)
        raise InvalidInput(
            f"--out {root} is in use by another `marlaas run` (process {lock.read().strip() or 'unknown'}): "
            "wait for it, or choose another --out"
        )
    with translated(root):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()


def _locked(lock: IO[str]) -> bool:
    """Lock the file; return False if another run has it. Try again, because `changes.is_running` shares the lock for a moment."""
    for _ in range(_LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def write(path: Path, data: bytes) -> None:
    """Replace a file's content atomically. Raises InvalidInput if that fails."""
    partial = path.with_name(f".{path.name}.partial")
    with translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)


def replace_folder(made: Path, target: Path) -> None:
    """Move a finished folder to `target` and delete the old one. Raises InvalidInput if that fails."""
    old = target.with_name(f".{target.name}.old")
    with translated(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        made.rename(target)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Convert an OSError of writing into an InvalidInput with a sentence."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(_sentence(path, error)) from error


def _link(path: Path, target: str) -> None:
    """Make a symbolic link, except on a file system that has none (FAT, some network shares)."""
    try:
        path.symlink_to(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise


def _sentence(path: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return f"{path}: the disk is full: free space and run the same command again"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path}: a file exists where a folder is needed: choose another folder"
    return f"{path} cannot be written ({error.strerror}): choose another folder"

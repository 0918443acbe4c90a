"""The output folder: what lies where, who holds it, and how files get into it (temp + rename, so no reader sees half a file).

Layout: `summary.json`, `<namespace>/<name>/…` for people; `.state/` is the runner's own (record of the run, NATS store, blobs, logs).
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, PoolDocument, Progress
from marlaas_api.names import JobRef

MIN_FREE_BYTES = 256 << 20
"""A run of the smallest job writes about this much (NATS store, adapters, logs)."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunRecord(BaseModel):
    """What was begun here, in `.state/run.json`; written before anything is started, and again at the end of a run.

    progress: how the jobs stood then. finished: every one of them is settled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    jobs: tuple[JobDocument, ...] = ()
    pools: tuple[PoolDocument, ...] = ()
    progress: tuple[Progress, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class OutFolder:
    """Paths and files of one output folder; use `hold` to get one."""

    root: Path

    @property
    def state(self) -> Path:
        """What only the runner reads."""
        return self.root / ".state"

    @property
    def nats_store(self) -> Path:
        """The embedded server's files."""
        return self.state / "nats"

    @property
    def blobs(self) -> Path:
        """The blob store."""
        return self.state / "blobs"

    @property
    def logs(self) -> Path:
        """Logs of the roles that serve all jobs."""
        return self.state / "logs"

    @property
    def scratch(self) -> Path:
        """Folders of the roles' own."""
        return self.state / "scratch"

    @property
    def documents(self) -> Path:
        """Pool and job documents that roles are started with."""
        return self.state / "documents"

    @property
    def summary(self) -> Path:
        """The result, for machines."""
        return self.root / "summary.json"

    def job(self, ref: JobRef) -> Path:
        """What people want of one job."""
        return self.root / ref.namespace / ref.name

    def read_record(self) -> RunRecord:
        """What was begun here before; empty for a new folder. Raises InvalidInput when the file is not ours."""
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
        """Replace the record. Raises InvalidInput when the folder takes no more."""
        write(self.state / "run.json", record.model_dump_json(indent=1).encode())

    def link_logs(self, ref: JobRef) -> None:
        """Show the logs of the roles that serve all jobs in the job's own folder too."""
        folder = self.job(ref) / "logs"
        with translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for log in self.logs.glob("*.log"):
                with contextlib.suppress(FileExistsError):
                    (folder / log.name).symlink_to(os.path.relpath(log, folder))


@contextlib.contextmanager
def hold(root: Path) -> Iterator[OutFolder]:
    """Make the folder, and keep every other `marlaas run` out of it while the context is open.

    Raises:
        InvalidInput: the path cannot be used (unwritable, no folder, nearly full), or another run holds it.
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
        for path in (folder.state, folder.logs, folder.scratch, folder.documents, folder.blobs, folder.nats_store):
            path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.state).free
    if free < MIN_FREE_BYTES:
        raise InvalidInput(
            f"--out {root}: only {free >> 20} MiB are free there and a run needs at least {MIN_FREE_BYTES >> 20} MiB: "
            "make room, or choose another --out"
        )


def _take(lock: IO[str], root: Path) -> None:
    """Lock for as long as the file is open; the operating system lets go of it whatever becomes of this process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise InvalidInput(
            f"--out {root} is in use by another `marlaas run` (process {lock.read().strip() or 'unknown'}): "
            "wait for it, or choose another --out"
        ) from None
    with translated(root):
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()


def write(path: Path, data: bytes) -> None:
    """Replace a file's content at once. Raises InvalidInput when that cannot be done."""
    partial = path.with_name(f".{path.name}.partial")
    with translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)


def replace_folder(made: Path, target: Path) -> None:
    """Put a finished folder in the place of another one. Raises InvalidInput when that cannot be done."""
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
    """Turn the operating system's refusal to write into a sentence."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(_sentence(path, error)) from error


def _sentence(path: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return f"{path}: the disk is full: make room and run the same command again"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return f"{path}: a file is in the way of this folder: choose another --out"
    return f"{path} cannot be written ({error.strerror}): choose another --out"

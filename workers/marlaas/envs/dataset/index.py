"""The index of a file: every row is rendered once, and its beginning and the digest of its prompt are kept in the cache.

Invariant: an index exists only if every row of the file can be used. It is found by the file's digest and the templates.
"""

import contextlib
import gc
import gzip
import hashlib
import os
import pickle
import shutil
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from marlaas.envs.dataset import arrow_rows, text_rows
from marlaas.envs.dataset.fields import Fields, flaw_of
from marlaas.envs.dataset.files import DataFile, digest
from marlaas.envs.dataset.problems import MAX_TOLD, InvalidRows, RowProblem
from marlaas.models.cache import build_once, cache_folder
from marlaas.models.errors import CacheUnusable
from marlaas_api.errors import InvalidInput

_VERSION = 2
_MAX_PROBLEMS = 1000
"""A scan ends after so many unusable rows."""
_BATCH = 4096
_LEAST_PARTED, _MAX_PARTS = 8, 8
"""Least batches of an Arrow file for each of several processes, and most processes."""
_is_parted = ContextVar("is_parted", default=False)
_MIB = 1 << 20
_DIGESTS, _LENGTHS, _STARTS, _LINES = "digests.npy", "lengths.npy", "starts.npy", "lines.npy"
_FLAWED = "flawed.npy"


class RowReader(Protocol):
    """Reads rows of a file, by number."""

    def __len__(self) -> int: ...
    def row(self, number: int) -> dict[str, Any]:
        """Return the columns of a row."""
        ...

    def place(self, number: int) -> str:
        """Return the place of a row within its file."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class IndexedFile:
    """A file whose rows can all be used.

    sha256: of its content. digests: of each row's prompt (`prompt_digest`), as unsigned integers of 64 bits. lengths: of the
    prompts, in characters. flawed: numbers of the rows whose conversation cannot be demonstrated.
    """

    file: DataFile
    sha256: str
    rows: RowReader
    digests: "np.ndarray[Any, Any]"
    lengths: "np.ndarray[Any, Any]"
    flawed: "np.ndarray[Any, Any]"

    def place(self, number: int) -> str:
        """Return file and line of a row."""
        return f"{self.file}:{self.rows.place(number)}"


_SHA256 = hashlib.sha256()


def prompt_digest(text: str) -> bytes:
    """Return the first 8 bytes of a prompt's SHA-256, by which `marlaas_api.names.split_of` divides texts too."""
    hashed = _SHA256.copy()  # half the time of a new one
    hashed.update(text.encode(errors="surrogatepass"))
    return hashed.digest()[:8]


def indexed(file: DataFile, fields: Fields) -> IndexedFile:
    """Return the file with its index; build what the cache lacks.

    Raises:
        InvalidRows: rows cannot be used.
        InvalidInput: the file cannot be read, or has no rows.
    """
    try:
        sha256 = digest(file)
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from None
    content = file.path
    if file.suffix == ".parquet" or file.is_gzip:
        name = f"rows{'.arrow' if file.suffix == '.parquet' else file.suffix}"
        content = _kept(f"rows-{sha256[:32]}", partial(_write_rows, file, name)) / name
    key = hashlib.sha256(f"{_VERSION} {sha256} {file.suffix} {fields.key}".encode()).hexdigest()[:32]
    folder = _kept(f"index-{key}", partial(_write_index, file, content, fields))
    digests, lengths = np.load(folder / _DIGESTS), np.load(folder / _LENGTHS)
    rows: RowReader
    if file.suffix == ".parquet":
        rows = arrow_rows.ArrowRows(content, len(digests))
    else:
        rows = text_rows.TextRows(content, np.load(folder / _STARTS), np.load(folder / _LINES))
    return IndexedFile(file, sha256, rows, digests, lengths, np.load(folder / _FLAWED))


def _kept(name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; where the cache cannot be written, one of this process's own temporary folder."""
    try:
        return build_once(cache_folder() / "datasets" / name, build, _MIB)
    except CacheUnusable:
        folder = Path(tempfile.gettempdir()) / f"marlaas-{name}"
        return build_once(folder, build, _MIB)


def _write_rows(file: DataFile, name: str, folder: Path) -> None:
    if file.suffix == ".parquet":
        arrow_rows.convert(file.path, folder / name, str(file))
        return
    try:
        with gzip.open(file.path) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target, _MIB)
    except (EOFError, gzip.BadGzipFile) as error:
        raise InvalidInput(f"{file} cannot be decompressed: {error}") from None


class _Index:
    """The index of a file while it is built. kind: what a row's number counts, before the number in places."""

    def __init__(self, file: DataFile, fields: Fields, kind: str = "") -> None:
        self._file, self._fields, self._kind = file, fields, kind
        self.digests = bytearray()
        self.lengths, self.starts, self.lines, self.flawed = array("Q"), array("Q"), array("Q"), array("Q")
        self._problems: list[str] = []
        self._num_problems = 0

    @property
    def read(self) -> Collection[str] | None:
        """The columns that are read; None: all."""
        return self._fields.columns

    def empty(self) -> "_Index":
        """Return an empty index of the same file."""
        return _Index(self._file, self._fields, self._kind)

    @property
    def added(self) -> "tuple[bytearray, array[int], array[int], array[int], array[int]]":
        """Digests, lengths, starts, lines and flawed numbers of the rows."""
        return self.digests, self.lengths, self.starts, self.lines, self.flawed

    def extend(self, added: "tuple[bytearray, array[int], array[int], array[int], array[int]]") -> None:
        """Add the rows that another index has `added`, which follow those here."""
        digests, lengths, starts, lines, flawed = added
        self.flawed.extend(len(self.lines) + one for one in flawed)
        self.digests += digests
        self.lengths += lengths
        self.starts += starts
        self.lines += lines

    def add(self, row: Any, line: int, start: int = 0) -> None:
        """Add a row, or the problem of one. Raises InvalidRows: there are too many problems."""
        try:
            if isinstance(row, RowProblem):
                raise row
            rendered = self._fields.render(row)
            text = rendered.text
        except RowProblem as problem:
            self._num_problems += 1
            if len(self._problems) < MAX_TOLD:
                self._problems.append(f"{self._file}:{self._kind}{line}: {problem}")
            if self._num_problems == _MAX_PROBLEMS:
                self.check()
            return
        if rendered.conversation and flaw_of(rendered.conversation):
            self.flawed.append(len(self.lines))
        self.digests += prompt_digest(text)
        self.lengths.append(len(text))
        self.starts.append(start)
        self.lines.append(line)

    def add_all(self, columns: Mapping[str, Sequence[Any]], lines: Sequence[int], starts: Sequence[int]) -> bool:
        """Add rows at once, if all of them can be used; return whether they were added. columns: the rows' values."""
        texts = self._fields.texts(columns, len(lines))
        if texts is None:
            return False
        self.digests += b"".join(map(prompt_digest, texts))
        self.lengths.extend(map(len, texts))
        self.starts.extend(starts)
        self.lines.extend(lines)
        return True

    def check(self) -> None:
        """Raise InvalidRows, if rows had problems; InvalidInput, if there are no rows."""
        if self._problems:
            raise InvalidRows(self._problems, self._num_problems)
        if not self.digests:
            raise InvalidInput(f"{self._file} has no rows")


def _write_index(file: DataFile, content: Path, fields: Fields, folder: Path) -> None:
    """Render every row. Raises InvalidRows, InvalidInput."""
    if file.suffix == ".parquet":
        index = _Index(file, fields, "row ")
        if not _add_in_parts(index, content, folder):
            _add_batches(index, content)
    else:
        index = _Index(file, fields)
        _add_lines(index, text_rows.scan(content), fields)
    index.check()
    np.save(folder / _DIGESTS, np.frombuffer(bytes(index.digests), ">u8").astype(np.uint64))
    np.save(folder / _LENGTHS, np.frombuffer(index.lengths, np.uint64).astype(np.uint32))
    np.save(folder / _FLAWED, np.frombuffer(index.flawed, np.uint64))
    if file.suffix != ".parquet":
        np.save(folder / _STARTS, np.frombuffer(index.starts, np.uint64))
        np.save(folder / _LINES, np.frombuffer(index.lines, np.uint64).astype(np.uint32))


@contextlib.contextmanager
def in_processes() -> Iterator[None]:
    """Have large files indexed by a process for each core in this context, for a person who waits. A sandbox has limits of its own."""
    token = _is_parted.set(True)
    try:
        yield
    finally:
        _is_parted.reset(token)


def may_fork() -> bool:
    """Return whether this is the context of `in_processes`."""
    return _is_parted.get()


def _add_in_parts(index: _Index, content: Path, folder: Path) -> bool:
    """Add all rows of a large Arrow file, in several processes; return False if nothing was added: rows have problems, or no process starts.

    folder: for the processes' results, which are removed.
    """
    num = arrow_rows.num_batches(content)
    num_parts = min(len(os.sched_getaffinity(0)), num // _LEAST_PARTED, _MAX_PARTS)
    if not may_fork() or num_parts < 2:
        return False
    ends = [num * part // num_parts for part in range(num_parts + 1)]
    parts = {folder / f"part-{first}": range(first, end) for first, end in pairwise(ends)}
    pids = []
    with contextlib.suppress(OSError):
        for path, batches in parts.items():
            pids.append(forked(partial(_write_part, index.empty(), content, batches, path)))
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    is_whole = len(pids) == len(parts) and not any(statuses)
    for path in parts:
        if is_whole:
            index.extend(pickle.loads(path.read_bytes()))
        path.unlink(missing_ok=True)
    return is_whole


def _write_part(index: _Index, content: Path, batches: range, path: Path) -> None:
    for batch in batches:
        _add_batches(index, content, range(batch, batch + 1))
        index.check()
    path.write_bytes(pickle.dumps(index.added))


def _add_batches(index: _Index, content: Path, batches: range | None = None) -> None:
    first = 1 + (batches.start * arrow_rows.BATCH if batches is not None else 0)
    for num, columns in arrow_rows.scan(content, index.read, batches):
        lines = range(first, first + num)
        if not index.add_all(columns, lines, [0] * num):
            for at, line in enumerate(lines):
                index.add({name: values[at] for name, values in columns.items()}, line)
        first += num


def forked(work: Callable[[], object]) -> int:
    """Return the pid of a child process that does this work and exits with 0; with 1 if the work raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        gc.disable()  # the process ends soon, and its rows are millions of objects
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def _add_lines(index: _Index, scanned: Iterator[text_rows.Scanned], fields: Fields) -> None:
    while found := list(islice(scanned, _BATCH)):
        rows = [one.row for one in found if not isinstance(one.row, RowProblem)]
        columns = {name: [row.get(name) for row in rows] for name in fields.columns or ()}
        if len(rows) == len(found) and index.add_all(
            columns, [one.line for one in found], [one.start for one in found]
        ):
            continue
        for one in found:
            index.add(one.row, one.line, one.start)

"""The blob gateway over `obstore` (folder, S3, GCS, Azure); the only module that imports it.

obstore's own coroutines are not used: if one is unfinished when its event loop closes, the interpreter crashes (obstore
0.12: segmentation fault). Its blocking calls release the GIL, so they run in threads, together with hashing.
"""

import asyncio
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from marlaas_api.blobs import (
    BlobCorrupt,
    BlobFull,
    BlobMissing,
    BlobRef,
    BlobRefused,
    BlobUnavailable,
    content_ref,
    verified,
)
from marlaas_api.errors import InvalidInput, MarlaasError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Config

T = TypeVar("T")

_CLOUDS = ("s3", "gs", "az")
_RETRY_S = 30.0
_MAX_CALLS = 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_UNFINISHED = re.compile(r"#\d+$")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_NO_SPACE = re.compile(
    r"status code: 507\b|StorageFull|Insufficient ?Storage|QuotaExceeded|QuotaReached|disk quota", re.IGNORECASE
)
"""Answers of object stores without space; S3-compatible stores have no common code for it."""
_STATUS = re.compile(r"status code: (\d+[\w ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_DENIED = re.compile(r"status code: 40[13]\b|AccessDenied|Forbidden|Unauthorized")
"""Numbers count only behind these words: errors also have times ("in 403.9ms") and the names of blobs."""


def open_blobs(url_or_path: str | Path) -> "StoreBlobs":
    """Open a store: a folder (created if missing), `file://`, `s3://bucket/prefix`, `gs://`, `az://` or `memory://`.

    Object stores take their credentials from the environment, under the usual names (`AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, ...; see obstore).

    Raises:
        InvalidInput: the URL scheme is unknown, or the configuration is incomplete.
        BlobUnavailable: the folder cannot be created.
    """
    where = str(url_or_path)
    scheme, separator, rest = where.partition("://")
    with _translated(where):
        if not separator or scheme == "file":
            folder = Path(rest if separator else where).absolute()
            return StoreBlobs(LocalStore(folder, mkdir=True), where=f"folder {folder}", root=folder)
        if scheme == "memory":
            return StoreBlobs(MemoryStore(), where=where)
        if scheme in _CLOUDS:
            return StoreBlobs(_cloud(where), where=where)
    raise InvalidInput(f"blob store {where!r}: give a folder, or a URL with file://, s3://, gs://, az:// or memory://")


def answer_of(error: BlobUnavailable) -> tuple[str, str]:
    """Return the HTTP status and the code of a store's answer; empty: it gave none."""
    status, code = (pattern.search(str(error.__cause__)) for pattern in (_STATUS, _CODE))
    return status[1].strip() if status else "", code[1] if code else ""


def _cloud(url: str, variables: Mapping[str, str] = MappingProxyType({})) -> ObjectStore:
    try:
        return from_url(
            url,
            config=cast("S3Config", dict(variables)) if variables else None,
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_RETRY_S)},
            # These options override the environment, also AWS_ALLOW_HTTP. HTTP is allowed, so that the endpoint's scheme decides.
            client_options={
                "allow_http": True,
                "connect_timeout": timedelta(seconds=5),
                "timeout": timedelta(minutes=5),
                # A store that accepts connections and says nothing. Large blobs are sent in parts, each a request.
                "read_timeout": timedelta(seconds=60),
            },
        )
    except (BaseError, ValueError) as error:
        raise InvalidInput(f"blob store {url}: {_first_line(error)}; check the URL and the environment") from error


class StoreBlobs:
    """The blobs of one store. where: the store's name in errors. root: the folder's path; None for object stores."""

    def __init__(self, store: ObjectStore, where: str, root: Path | None = None) -> None:
        self._store = store
        self._where, self._root = where, root
        # Threads of its own: calls that a silent store does not answer must not take those of the process.
        self._threads = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="blobs")

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        return await self._run(lambda: self._put(folder, filename, data))

    async def get(self, ref: BlobRef) -> bytes:
        return await self._run(lambda: self._get(ref))

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        await self._run(lambda: self._fetch(ref, target))

    async def read(self, ref: BlobRef, start: int, num: int) -> bytes:
        return await self._run(lambda: self._read(ref, start, num))

    async def list(self, prefix: str) -> list[str]:
        return await self._run(lambda: _names(self._store, prefix, self._where))

    async def delete(self, name: str) -> None:
        await self._run(lambda: self._delete(name))

    async def sweep(self, folder: str) -> None:
        if (root := self._root) is not None:
            await self._run(lambda: _sweep(root / folder, self._where))

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        ref = content_ref(folder, filename, data)
        # Write even if the blob exists: the bytes are the same, and a damaged blob is repaired.
        with _translated(self._where):
            obstore.put(self._store, ref.name, data)
        return ref

    def _get(self, ref: BlobRef) -> bytes:
        return verified(ref, b"".join(self._chunks(ref)))

    def _fetch(self, ref: BlobRef, target: Path) -> None:
        part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
        with _translated(f"file {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("wb") as file:
                    self._copy(ref, file)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)

    def _copy(self, ref: BlobRef, file: BinaryIO) -> None:
        digest = hashlib.sha256()
        for chunk in self._chunks(ref):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != ref.sha256:
            raise BlobCorrupt(f"blob {ref.name} is corrupt: sha256 is {digest.hexdigest()}, expected {ref.sha256}")

    def _chunks(self, ref: BlobRef) -> Iterator[bytes]:
        with self._reading(ref):
            yield from obstore.get(self._store, ref.name)

    def _read(self, ref: BlobRef, start: int, num: int) -> bytes:
        end = min(start + num, ref.size_bytes)
        with self._reading(ref):
            return bytes(obstore.get_range(self._store, ref.name, start=start, end=end)) if start < end else b""

    @contextmanager
    def _reading(self, ref: BlobRef) -> Iterator[None]:
        if self._root is not None and not self._root.is_dir():  # not mounted: its blobs are not missing
            raise BlobUnavailable(f"{self._where} does not exist: mount it again")
        with _translated(self._where, missing=ref.name):
            yield

    def _delete(self, name: str) -> None:
        try:
            with _translated(self._where, missing=name):
                obstore.delete(self._store, name)
        except BlobMissing:
            return


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a bucket. version: the store's tag of its content."""

    name: str
    size_bytes: int
    version: str


class ForeignBucket:
    """Objects that others read and write, too. Its calls block, and raise BlobMissing and BlobUnavailable, whose cause is the store's own error.

    Args:
        url: for example `s3://bucket` or `s3://bucket/prefix`, below which all names are; credentials as for `open_blobs`.
        variables: replace those of the environment.

    Raises:
        InvalidInput: the configuration is incomplete.
    """

    def __init__(self, url: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._url, self._store = url, _cloud(url, variables)

    def below(self, folder: str) -> list[StoredObject]:
        """Return the objects below a folder, sorted by name; the empty folder is the whole bucket."""
        with _translated(self._url):
            found = [meta for page in obstore.list(self._store, folder or None) for meta in page]
        return sorted(map(_stored, found), key=lambda one: one.name)

    def head(self, name: str) -> StoredObject:
        """Return what the store knows of one object."""
        with _translated(self._url, missing=name):
            return _stored(obstore.head(self._store, name))

    def copy(self, one: StoredObject, target: Path) -> None:
        """Write an object to a file. Raises InvalidInput if the store has another version of it by now."""
        with _translated(self._url, missing=one.name), target.open("wb") as file:
            answer = obstore.get(self._store, one.name)
            if (found := _stored(answer.meta)) == one:
                for chunk in answer:
                    file.write(chunk)
        if found != one:
            raise InvalidInput(f"{self._url}/{one.name} was replaced while it was read; begin again")

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        with _translated(self._url, missing=name):
            return bytes(obstore.get(self._store, name).bytes())

    def write(self, name: str, content: bytes | Path) -> str:
        """Write an object, whole or not at all, and return its version as `below` does; empty if the store gives none.

        content: or the file that has it.
        """
        with _translated(self._url):
            return (obstore.put(self._store, name, content)["e_tag"] or "").strip('"')

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(BlobMissing), _translated(self._url, missing=name):
            obstore.delete(self._store, name)


def _stored(meta: "ObjectMeta") -> StoredObject:
    return StoredObject(meta["path"], meta["size"], (meta["e_tag"] or str(meta["last_modified"])).strip('"'))


def _names(store: ObjectStore, prefix: str, where: str) -> list[str]:
    with _translated(where):
        return sorted(meta["path"] for page in obstore.list(store, prefix.rstrip("/")) for meta in page)


def _sweep(folder: Path, where: str) -> None:
    """Remove unfinished files, which obstore names `<name>#<number>` and never lists, and empty folders, also this one."""
    with _translated(where):
        for parent, _, names in os.walk(folder, topdown=False):
            for name in names:
                if _UNFINISHED.search(name):
                    Path(parent, name).unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                Path(parent).rmdir()


@contextmanager
def _translated(where: str, missing: str | None = None) -> Iterator[None]:
    """Translate exceptions of obstore and the system into ours; `missing` is the blob to which a "not found" refers."""
    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError | ValueError) and "NoSuchBucket" not in str(error)
        if missing is not None and is_missing:
            raise BlobMissing(f"no blob {missing} in {where}") from error
        raise _verdict(where, error) from error


def _verdict(where: str, error: Exception) -> MarlaasError:
    if isinstance(error, ValueError):
        return BlobRefused(f"{where}: {_first_line(error)}")
    code = _errno(error)
    if code in _FULL or (code is None and _NO_SPACE.search(str(error))):
        return BlobFull(f"{where} is full ({_first_line(error)}): free some space or raise the quota")
    is_denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
    if code in _FORBIDDEN or is_denied or (code is None and _DENIED.search(_first_line(error))):
        return BlobRefused(f"{where} refuses ({_first_line(error)}): grant this process read and write there")
    return BlobUnavailable(f"{where} does not answer: {_first_line(error)}")


def _errno(error: Exception) -> int | None:
    """Return the system's error number; obstore has it only in the error text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""Where adapters are uploaded: repositories of the Hugging Face hub, prefixes of a bucket, and folders of a volume.

The marker of a bucket or a volume is written last, so it lies beside all files of the version that it names, and an upload that a kill has interrupted
is repeated. It has their digests: a reader of a bucket, where files are replaced one by one, compares them. The hub takes all files in one commit, and
needs no marker.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from marlaas.adapter_folder import CARD, CURVE, MARKER, Files, objection, own_files, write_adapter
from marlaas.models.errors import UploadRefused
from marlaas.models.hub import check_repository, require_token, upload
from marlaas_api.blobs import S3_CREDENTIALS, BlobMissing, BlobUnavailable
from marlaas_api.errors import InvalidInput
from marlaas_api.failpoints import failpoint
from marlaas_api.messages.job_spec import ExportSettings, Upload

if TYPE_CHECKING:
    from marlaas_api.blobs_store import ForeignBucket

BUCKET = "s3://"
_HOW = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and AWS_REGION or AWS_ENDPOINT_URL"
_PREFIX = re.compile(r"s3://[\w.-]+(/[\w-][\w.=@-]*)+")


class UploadTarget(Protocol):
    """Kind of storage that adapters are uploaded to: the hub, buckets or volumes.

    The methods take an address: a repository of the hub, the URL of a prefix in a bucket, or a folder. They block. They raise
    InvalidInput, whose text says what to do.
    """

    @property
    def name(self) -> Upload:
        """The target's key in a job's `export` settings."""
        ...

    def require(self, addresses: Iterable[str]) -> None:
        """Check credentials and addresses, without a request to the target."""
        ...

    def loaded_as(self, address: str) -> str:
        """Return the name by which PEFT loads the adapter: the repository, or the name of a folder with the files."""
        ...

    def has(self, address: str, marker: bytes) -> bool:
        """Return whether the address has the version with this marker; always False for the hub. marker: content of the marker file."""
        ...

    def put(self, address: str, files: Files, marker: bytes) -> str:
        """Write all files in place of those of other versions, and return the address as text for people.

        files: by name. marker: content of the marker file; not written to the hub.
        """
        ...


@dataclass(frozen=True, slots=True)
class HubTarget:
    """Repositories of the Hugging Face hub.

    Attributes:
        is_private: whether repositories that an upload creates are private.
        ready: checks that there is a token; raises InvalidInput if there is none.
    """

    is_private: bool
    ready: Callable[[], None] = require_token

    @property
    def name(self) -> Upload:
        return "hub"

    def require(self, addresses: Iterable[str]) -> None:
        self.ready()
        for address in addresses:
            check_repository(address)

    def loaded_as(self, address: str) -> str:
        return address

    def has(self, address: str, marker: bytes) -> bool:
        return False

    def put(self, address: str, files: Files, marker: bytes) -> str:
        return upload(address, files, is_private=self.is_private)


@dataclass(frozen=True, slots=True)
class BucketTarget:
    """Prefixes of buckets of S3. variables: returns those of its client, with the credentials; None: the client reads those of the process."""

    variables: Callable[[], Mapping[str, str]] | None = None

    @property
    def name(self) -> Upload:
        return "s3"

    def require(self, addresses: Iterable[str]) -> None:
        given = os.environ if self.variables is None else self.variables()
        if not any(given.get(name) for name in S3_CREDENTIALS):
            raise UploadRefused(f"there are no credentials for the bucket: {_HOW}")
        for address in addresses:
            if _PREFIX.fullmatch(address) is None:
                raise UploadRefused(f"{address} is no s3://BUCKET/PREFIX")

    def loaded_as(self, address: str) -> str:
        return address.rpartition("/")[2]

    def has(self, address: str, marker: bytes) -> bool:
        try:
            with _answered(address):
                return self._open(address).read(MARKER) == marker
        except BlobMissing:
            return False

    def put(self, address: str, files: Files, marker: bytes) -> str:
        with _answered(address):
            bucket = self._open(address)
            old = frozenset[str]()
            with suppress(BlobMissing):  # a first upload needs no right to delete
                old = own_files(bucket.read(MARKER))
                bucket.remove(MARKER)  # before its files are replaced one by one
            written = {name: bucket.write(name, content) for name, content in files.items()}
            for name in old - files.keys():
                bucket.remove(name)
            failpoint("exporter.upload.after_files")
            written[MARKER] = bucket.write(MARKER, marker)
            there = {one.name: one.version for one in bucket.below("")}
            if any(version and there.get(name) != version for name, version in written.items()):
                bucket.remove(MARKER)
                raise UploadRefused(f"somebody else writes to {address}: give each job a prefix of its own")
        return address

    def _open(self, address: str) -> "ForeignBucket":
        from marlaas_api.blobs_store import ForeignBucket

        return ForeignBucket(address, {} if self.variables is None else self.variables())


@contextmanager
def _answered(address: str) -> Iterator[None]:
    """Raise UploadRefused with the store's status and code. The rest of its answer may repeat a credential."""
    from marlaas_api.blobs_store import answer_of

    try:
        yield
    except BlobUnavailable as error:
        status, code = answer_of(error)
        what = f"answers {status}{f' ({code})' if code else ''}" if status else "does not answer"
        how = f"; {_HOW}" if status[:3] in ("401", "403") else ""
        raise UploadRefused(f"the store of {address} {what}{how}") from error


@dataclass(frozen=True, slots=True)
class VolumeTarget:
    """Folders. root: of relative addresses, the folder at which a claim is mounted."""

    root: Path = Path()

    @property
    def name(self) -> Upload:
        return "volume"

    def require(self, addresses: Iterable[str]) -> None:
        if self.root.is_absolute() and not self.root.is_dir():
            raise InvalidInput(f"the claim is not mounted at {self.root} yet")
        for address in addresses:
            # A link is replaced by no rename, and on a claim another pod may have made it.
            why = (
                "is a symbolic link; give the folder itself"
                if self._at(address).is_symlink()
                else objection(self._at(address))
            )
            if why is not None:
                raise InvalidInput(f"{self._at(address)} {why}")

    def loaded_as(self, address: str) -> str:
        return self._at(address).name

    def has(self, address: str, marker: bytes) -> bool:
        try:
            return (self._at(address) / MARKER).read_bytes() == marker
        except OSError:
            return False

    def put(self, address: str, files: Files, marker: bytes) -> str:
        write_adapter({**files, MARKER: marker}, self._at(address))
        return str(self._at(address))

    def _at(self, address: str) -> Path:
        return (self.root / address).expanduser().absolute()


def own_target(name: Upload, export: ExportSettings) -> UploadTarget:
    """Return a target of a job as this machine reaches it: with the credentials of the user's shell, and folders instead of claims."""
    if name == "hub":
        return HubTarget(is_private=export.hub is None or export.hub.private)
    return BucketTarget() if name == "s3" else VolumeTarget()


def named_target(address: str, *, is_private: bool) -> UploadTarget:
    """Return the target of an address: s3://BUCKET/PREFIX, a folder that begins with / or . or ~, or else a repository of the hub."""
    if address.startswith(BUCKET):
        return BucketTarget()
    return VolumeTarget() if address.startswith(("/", ".", "~")) else HubTarget(is_private)


def marker_of(sha256: Mapping[str, str], **told: object) -> bytes:
    """Return the marker of a version: whose it is, and the digests of its files.

    Args:
        sha256: in hex, of each of the adapter's own files by name. Card and curve are left out: they may differ between two uploads of a version.
        told: what the marker says besides.
    """
    own = {name: digest for name, digest in sorted(sha256.items()) if name not in (CARD, CURVE)}
    body = {**told, "sha256": own}
    return f"{json.dumps(body, indent=2)}\n".encode()

"""The blob seam: storage of adapters, checkpoints and payloads too large for the bus, under names that contain a hash.

Invariant: a blob is written whole or not at all, and never changes. `marlaas_api.blobs_store.open_blobs` opens the real
store (over `obstore`: folder, S3, GCS, Azure). `marlaas_api.blobs_memory.MemoryBlobs` is the fake. Both pass
`tests/api/test_blobs_contract.py`.
"""

import hashlib
import re
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from marlaas_api.errors import Permanent, Retryable
from marlaas_api.reasons import Reason


class BlobMissing(Permanent):
    """There is no blob of that name."""


class BlobCorrupt(Permanent):
    """The bytes of a blob do not have the sha256 of its reference."""


class BlobUnavailable(Retryable):
    """The store did not answer, or answered with an error of its own. Callers wait: only missing and wrong bytes are final."""

    reason = Reason.STORE_SILENT


class BlobFull(BlobUnavailable):
    """The store, or the local disk, has no space, or a quota is used up."""

    reason = Reason.STORE_FULL


class BlobRefused(BlobUnavailable):
    """The store refuses the call: missing permission, expired credential, or read-only disk."""

    reason = Reason.STORE_REFUSED


class BlobRef(BaseModel):
    """A reference to a blob: its name, and the sha256 (hex) and length of its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    sha256: str
    size_bytes: int


S3_CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of credentials for S3. Without one of them the client would ask a cloud's metadata service, which no pod of a job may reach."""


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


_NAME = re.compile(r"(?!.*//)[A-Za-z0-9][A-Za-z0-9._@=/-]*")


def content_ref(folder: str, filename: str, data: bytes) -> BlobRef:
    """Return the reference under which `Blobs.put` stores some bytes: `<folder>/<sha256[:16]>-<filename>`.

    Raises:
        ValueError: the name has characters other than letters, digits and `._@=/-`, or leaves its folder.
    """
    sha256 = sha256_hex(data)
    name = f"{folder}/{sha256[:16]}-{filename}"
    if "/" in filename or not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"not a blob name: {name!r}")
    return BlobRef(name=name, sha256=sha256, size_bytes=len(data))


def verified(ref: BlobRef, data: bytes) -> bytes:
    """Return the bytes unchanged if their sha256 is that of the reference. Raises BlobCorrupt."""
    found = sha256_hex(data)
    if found != ref.sha256:
        raise BlobCorrupt(
            f"blob {ref.name} is corrupt: sha256 is {found} of {len(data)} bytes, expected {ref.sha256} of {ref.size_bytes}"
        )
    return data


class Blobs(Protocol):
    """A store of immutable blobs. Names are slash-separated; the first part is the namespace."""

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        """Write under the name of `content_ref`; idempotent. Raises BlobUnavailable."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """Return the bytes of a blob, verified by its sha256. Raises BlobMissing, BlobCorrupt, BlobUnavailable."""
        ...

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        """Read, verify and write to a local file by temp file and rename; create its folder. Raises as `get`."""
        ...

    async def read(self, ref: BlobRef, start: int, num: int) -> bytes:
        """Return at most `num` bytes (1 or more) from byte `start` on, which the caller verifies. Raises BlobMissing, BlobUnavailable."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """Return the sorted names of all blobs below a folder; `""` lists the whole store."""
        ...

    async def delete(self, name: str) -> None:
        """Remove a blob; no error if it does not exist."""
        ...

    async def sweep(self, folder: str) -> None:
        """Remove incomplete files of killed writers, which `list` does not return, and empty folders below a folder.

        Call it only while nothing is written there.
        """
        ...

"""The blob seam: adapters, checkpoints and payloads too large for the bus, under content names.

Invariant: a blob is written whole or not at all and never changes. `marlaas_api.blobs_store.open_blobs` is the real one (over
`obstore`: folder, S3, GCS, Azure), `marlaas_api.blobs_memory.MemoryBlobs` ships as its fake; both pass
`tests/api/test_blobs_contract.py`.
"""

import hashlib
import re
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from marlaas_api.errors import Permanent, Retryable


class BlobMissing(Permanent):
    """No blob of that name."""


class BlobCorrupt(Permanent):
    """The bytes do not have the sha256 that their name promises."""


class BlobUnavailable(Retryable):
    """The store did not answer, or is full."""


class BlobRefused(Permanent):
    """The store refuses this for good: permission, a read-only disk, a URL it does not know."""


class BlobRef(BaseModel):
    """A blob's name, what its bytes must hash to (sha256, hex), and their number."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    sha256: str
    size_bytes: int


def sha256_hex(data: bytes) -> str:
    """The content name of some bytes."""
    return hashlib.sha256(data).hexdigest()


_NAME = re.compile(r"(?!.*//)[A-Za-z0-9][A-Za-z0-9._@=/-]*")


def content_ref(folder: str, filename: str, data: bytes) -> BlobRef:
    """The reference under which `Blobs.put` stores some bytes: `<folder>/<sha256[:16]>-<filename>`.

    Raises:
        ValueError: a name outside letters, digits and `._@=-`, or one that leaves its folder.
    """
    sha256 = sha256_hex(data)
    name = f"{folder}/{sha256[:16]}-{filename}"
    if "/" in filename or not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"not a blob name: {name!r}")
    return BlobRef(name=name, sha256=sha256, size_bytes=len(data))


def verified(ref: BlobRef, data: bytes) -> bytes:
    """The same bytes, if they are what the reference promises. Raises BlobCorrupt."""
    found = sha256_hex(data)
    if found != ref.sha256:
        raise BlobCorrupt(
            f"blob {ref.name} is corrupt: sha256 is {found} of {len(data)} bytes, expected {ref.sha256} of {ref.size_bytes}"
        )
    return data


class Blobs(Protocol):
    """A store of immutable blobs. Names are slash-separated; the first part is the namespace."""

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        """Write as `content_ref` says; idempotent. Raises BlobUnavailable (also when the disk is full), BlobRefused."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """Read and verify. Raises BlobMissing, BlobCorrupt, BlobUnavailable, BlobRefused."""
        ...

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        """Read, verify and write to a local file (its folder is made) by temp + rename. Raises as `get`."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """The names of all blobs below a folder (`""`: all there are), sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Remove; no error when it is not there."""
        ...

"""The blob seam: adapters, checkpoints and payloads too large for the bus, under content names.

Invariant: a blob is written whole or not at all and never changes. `marlaas_api.blobs_store.open_blobs` is the real one (over
`obstore`: folder, S3, GCS, Azure), `marlaas_api.blobs_memory.MemoryBlobs` ships as its fake; both pass
`tests/api/test_blobs_contract.py`.
"""

import hashlib
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


class BlobRef(BaseModel):
    """A blob's name, what its bytes must hash to (sha256, hex), and their number."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    sha256: str
    size_bytes: int


def sha256_hex(data: bytes) -> str:
    """The content name of some bytes."""
    return hashlib.sha256(data).hexdigest()


class Blobs(Protocol):
    """A store of immutable blobs. Names are slash-separated; the first part is the namespace."""

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        """Write as `<folder>/<sha256[:16]>-<filename>`; idempotent. Raises BlobUnavailable (also when the disk is full)."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """Read and verify. Raises BlobMissing, BlobCorrupt, BlobUnavailable."""
        ...

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        """Read, verify and write to a local file by temp + rename. Raises as `get`."""
        ...

    async def list(self, prefix: str) -> list[str]: ...
    async def delete(self, name: str) -> None:
        """Remove; no error when it is not there."""
        ...

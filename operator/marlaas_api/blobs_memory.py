"""The fake of the blob seam: a dict. It ships with the product; tests of every role use it.

It uses neither disk nor network. Tests inject faults: they may change `contents`, and every call raises `failure` while
it is set.
"""

import os
from pathlib import Path

from marlaas_api.blobs import BlobMissing, BlobRef, content_ref, verified
from marlaas_api.errors import MarlaasError


class MemoryBlobs:
    """An in-memory blob store of one process."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.failure: MarlaasError | None = None

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        self._check()
        ref = content_ref(folder, filename, data)
        self.contents[ref.name] = bytes(data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        self._check()
        if ref.name not in self.contents:
            raise BlobMissing(f"no blob {ref.name}")
        return verified(ref, self.contents[ref.name])

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        data = await self.get(ref)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
        part.write_bytes(data)
        part.replace(target)

    async def read(self, ref: BlobRef, start: int, num: int) -> bytes:
        self._check()
        if ref.name not in self.contents:
            raise BlobMissing(f"no blob {ref.name}")
        return self.contents[ref.name][start : start + num]

    async def list(self, prefix: str) -> list[str]:
        self._check()
        folder = prefix.rstrip("/") + "/" if prefix else ""
        return sorted(name for name in self.contents if name.startswith(folder))

    async def delete(self, name: str) -> None:
        self._check()
        self.contents.pop(name, None)

    async def sweep(self, folder: str) -> None:
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

"""`python -m marlaas.cluster.published`: writes a published adapter as a tar archive to standard output.

`marlaas adapter` runs it in the orchestrator's pod, which can reach the bus and the blob store. The bus determines
which files in the store belong to the version; their names alone do not.
"""

import argparse
import asyncio
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from marlaas.local.adapter import fetch
from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.errors import MarlaasError, Permanent
from marlaas_api.messages import JobDocument
from marlaas_api.policy_manifest import find_manifest
from marlaas_api.wire import decode_as

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VersionRequest:
    """One version of one agent of a job that still exists."""

    namespace: str
    job: str
    agent: str
    version: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive and return 0; on an error, return 1 with the reason on stderr and nothing on stdout."""
    parser = argparse.ArgumentParser(prog="python -m marlaas.cluster.published")
    for flag in ("--nats", "--blobs", "--namespace", "--job", "--agent"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--creds", type=Path)
    parser.add_argument("--version", required=True, type=int)
    options = parser.parse_args(arguments)
    wanted = VersionRequest(options.namespace, options.job, options.agent, options.version)
    try:
        asyncio.run(_send(options, wanted))
    except MarlaasError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


async def pack(bus: Bus, blobs: Blobs, wanted: VersionRequest, out: IO[bytes]) -> None:
    """Write the version's files as a tar archive, after all of them were fetched and verified.

    Raises Permanent if the job or the version no longer exists, and the errors of `Bucket.get` and `Blobs.fetch`.
    """
    entry = await (await bus.bucket(subjects.JOBS)).get(subjects.job_key(wanted.namespace, wanted.job))
    if entry is None or entry.data is None:
        raise Permanent(f"job {wanted.namespace}/{wanted.job} does not exist on the bus")
    document = decode_as(JobDocument, entry.data)
    manifest = await find_manifest(bus, blobs, document, wanted.agent, wanted.version)
    if manifest is None:
        raise Permanent(f"agent {wanted.agent} of {document.ref} has no version {wanted.version} in the store")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as archive:
        adapter = Path(folder) / "adapter"
        await fetch(blobs, manifest, adapter)
        _archive(adapter, archive)
        while chunk := archive.read(_CHUNK_BYTES):
            out.write(chunk)


def _archive(folder: Path, archive: IO[bytes]) -> None:
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    archive.seek(0)


async def _send(options: argparse.Namespace, wanted: VersionRequest) -> None:
    bus = await connect(options.nats, name="marlaas-adapter", creds=options.creds)
    try:
        await pack(bus, open_blobs(options.blobs), wanted, sys.stdout.buffer)
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(main())

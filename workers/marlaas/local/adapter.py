"""Fetch a published adapter from the blob store into a PEFT folder."""

import shutil
from pathlib import Path

from marlaas.local.folder import replace_folder, translated
from marlaas.manifest.references import objection
from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Manifest, PolicyRecord
from marlaas_api.wire import decode_as


async def find(bus: Bus, blobs: Blobs, document: JobDocument, agent: str, version: int) -> Manifest | None:
    """Return the manifest of an agent's version; None if it does not exist.

    Follows the parents back from the newest manifest in the policy key. Raises the errors of `Bucket.get` and
    `Blobs.get`.
    """
    bucket = await bus.bucket(subjects.POLICY)
    entry = await bucket.get(subjects.policy_key(document.namespace, document.job, agent))
    if entry is None or entry.data is None:
        return None
    record = decode_as(PolicyRecord, entry.data)
    ref = record.manifest if record.uid == document.uid else None
    while ref is not None:
        manifest = decode_as(Manifest, await blobs.get(ref))
        if manifest.version <= version:
            return manifest if manifest.version == version else None
        ref = manifest.parent
    return None


async def fetch(blobs: Blobs, manifest: Manifest, target: Path) -> None:
    """Write the adapter's files as a folder, completely or not at all. Raises InvalidInput, and the errors of `Blobs.fetch`."""
    partial = target.with_name(f".{target.name}.partial")
    with translated(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    for name, ref in manifest.files.items():
        await blobs.fetch(ref, partial / name)
    replace_folder(partial, target)


def export(adapter: Path, path: str, part: str) -> None:
    """Copy the adapter to the job's export path, or to its subfolder `part` if the job has several agents; all files or none.

    Raises:
        InvalidInput: the path cannot be written, or holds something else, which is left unchanged.
    """
    target = (Path(path).expanduser() / part).resolve()
    partial = target.with_name(f".{target.name}.partial")
    try:
        why = objection(target)
        if why is not None:
            raise InvalidInput(why)
        with translated(target):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(adapter, partial)
        replace_folder(partial, target)
    except InvalidInput as error:
        text = f"spec.export.path: the trained adapter is in {adapter} and cannot be copied to {target}: {error}"
        raise InvalidInput(text) from error

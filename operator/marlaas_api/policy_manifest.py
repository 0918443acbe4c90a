"""Finds the manifest of an agent's version: the policy key names the newest one, and each manifest its parent."""

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.messages import JobDocument, Manifest, PolicyRecord
from marlaas_api.wire import decode_as


async def find_manifest(bus: Bus, blobs: Blobs, document: JobDocument, agent: str, version: int) -> Manifest | None:
    """Return the manifest of an agent's version; None if it does not exist. Raises the errors of `Bucket.get` and `Blobs.get`."""
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

"""A version out of the blobs and into them: what a learner goes on from, and what it publishes."""

from torch import Tensor

from marlaas_api import wire
from marlaas_api.blobs import BlobMissing, BlobRef, Blobs
from marlaas_api.messages import Calibration, Manifest
from marlaas_worker.adapters import TENSORS_FILE, read_adapter, tensor_digests, write_adapter
from marlaas_worker.calibration import tolerance_of
from marlaas_worker.trainer.commit import StepResult, VersionContents
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.state import StateInvalid, TrainingState, read_state, write_state


async def read_manifest(blobs: Blobs, ref: BlobRef) -> Manifest:
    """Read what a version is. Raises as `Blobs.get` and `wire.decode_as`."""
    return wire.decode_as(Manifest, await blobs.get(ref))


async def read_version(blobs: Blobs, manifest: Manifest) -> tuple[dict[str, Tensor], TrainingState]:
    """Read a version's weights and training state. Raises Permanent for what is missing or damaged."""
    if manifest.state is None:
        raise StateInvalid(f"{manifest.adapter} has no training state to go on from")
    tensors, _ = read_adapter({name: await blobs.get(ref) for name, ref in manifest.files.items()})
    state = read_state(await blobs.get(manifest.state))
    if state.step != manifest.step or state.consumed != manifest.consumed:
        raise StateInvalid(f"{manifest.adapter}: its training state belongs to step {state.step}, not {manifest.step}")
    return tensors, state


async def known_adapters(blobs: Blobs, manifest: Manifest, num_before: int) -> dict[int, str]:
    """sha256 of the adapter file by version: of this one, and of up to `num_before` before it, as far as they are kept."""
    known = {manifest.version: manifest.files[TENSORS_FILE].sha256}
    while manifest.parent is not None and len(known) <= num_before:
        try:
            manifest = await read_manifest(blobs, manifest.parent)
        except BlobMissing:
            break
        known[manifest.version] = manifest.files[TENSORS_FILE].sha256
    return known


class PastVersions:
    """Weights of an agent's earlier versions, found from manifest to parent manifest; only the versions walked through are remembered.

    Adapter files are kept as long as the job, whatever checkpoint.keep says of training states, so a version found once is found again after a restart.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._manifests: dict[int, Manifest] = {}

    async def weights(self, newest: BlobRef, newest_version: int, version: int) -> dict[str, Tensor]:
        """Read a version's weights, which is `newest_version` or an ancestor of it. Raises StateInvalid if there is none, and as `Blobs.get`."""
        manifest = await self._manifest(newest_version, newest)
        while manifest.version > version and manifest.parent is not None:
            manifest = await self._manifest(manifest.version - 1, manifest.parent)
        if manifest.version != version:
            raise StateInvalid(f"{manifest.adapter} has no ancestor of version {version}")
        self._manifests = {number: kept for number, kept in self._manifests.items() if number >= version}
        tensors, _ = read_adapter({name: await self._blobs.get(ref) for name, ref in manifest.files.items()})
        return tensors

    async def _manifest(self, version: int, ref: BlobRef) -> Manifest:
        if version not in self._manifests:
            self._manifests[version] = await read_manifest(self._blobs, ref)
        return self._manifests[version]


def contents_of(learner: Learner, calibration: Calibration, result: StepResult) -> VersionContents:
    """The learner's present weights as a version; runs on the compute thread."""
    weights = learner.weights()
    probes, noise = learner.measure(calibration.probes)
    return VersionContents(
        result=result,
        rank=learner.config.rank,
        files=write_adapter(weights, learner.config),
        state=write_state(learner.state(result.step, result.consumed)),
        digests=tensor_digests(weights, learner.config.scaling),
        probes=probes,
        probe_tolerance=max(calibration.tolerance, tolerance_of(noise)),  # rounding costs more under some adapters
    )

"""Versions of an agent: read from the blob store, cached in host memory, and built from a learner."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from marlaas_api import wire
from marlaas_api.blobs import BlobMissing, BlobRef, Blobs
from marlaas_api.messages import Calibration, Manifest, Probe
from marlaas_worker.adapters import TENSORS_FILE, AdapterConfig, read_adapter, tensor_digests, write_adapter
from marlaas_worker.calibration import sufficient_probes, tolerance_of
from marlaas_worker.trainer.commit import StepResult, VersionContents
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import StateInvalid, TrainingState, read_state, write_state


async def read_manifest(blobs: Blobs, ref: BlobRef) -> Manifest:
    """Read a version's manifest. Raises as `Blobs.get` and `wire.decode_as`."""
    return wire.decode_as(Manifest, await blobs.get(ref), ref.name)


async def read_version(blobs: Blobs, manifest: Manifest) -> tuple[dict[str, Tensor], TrainingState]:
    """Read a version's weights and training state. Raises Permanent if a blob is missing or damaged."""
    if manifest.state is None:
        raise StateInvalid(f"{manifest.adapter} has no training state to continue from")
    tensors, _ = read_adapter({name: await blobs.get(ref) for name, ref in manifest.files.items()})
    state = read_state(await blobs.get(manifest.state))
    if state.step != manifest.step or state.consumed != manifest.consumed:
        raise StateInvalid(f"{manifest.adapter}: its training state belongs to step {state.step}, not {manifest.step}")
    return tensors, state


async def known_adapters(blobs: Blobs, manifest: Manifest, num_before: int) -> dict[int, str]:
    """Return the adapter file's sha256 by version, for this version and up to `num_before` earlier ones.

    Versions whose manifests no longer exist are left out.
    """
    known = {manifest.version: manifest.files[TENSORS_FILE].sha256}
    while manifest.parent is not None and len(known) <= num_before:
        try:
            manifest = await read_manifest(blobs, manifest.parent)
        except BlobMissing:
            break
        known[manifest.version] = manifest.files[TENSORS_FILE].sha256
    return known


class PastVersions:
    """Weights of an agent's earlier versions, found by following parent manifests; visited manifests are cached.

    Adapter files are kept as long as the job, independently of checkpoint.keep, which limits training states. So a
    version that was found once is found again after a restart.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._manifests: dict[int, Manifest] = {}

    async def weights(self, newest: BlobRef, newest_version: int, version: int) -> dict[str, Tensor]:
        """Read the weights of a version, which is `newest_version` or an ancestor of it. newest: manifest of `newest_version`.

        Raises:
            StateInvalid: there is no such ancestor. Other errors as `Blobs.get`.
        """
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


@dataclass(frozen=True, slots=True, eq=False)
class CachedVersion:
    """A version's weights (by PEFT's names) and training state in host memory; never changed. manifest: identifies the version."""

    manifest: BlobRef
    weights: Mapping[str, Tensor]
    state: TrainingState

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.weights, self.state.first_moments, self.state.second_moments, self.state.initial)
        return sum(tensor.nbytes for part in parts for tensor in part.values())


class VersionCache:
    """The newest version of each agent, by policy key, from which parked agents are restored.

    It is for models on an accelerator. On a CPU, agents are in host memory already, so max_bytes is 0, and parked agents are
    restored from the blob store. Beyond max_bytes, the least recently used versions are dropped; 0 keeps none.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._versions: OrderedDict[str, CachedVersion] = OrderedDict()
        self._num_bytes = 0

    def put(self, agent: str, version: CachedVersion) -> None:
        """Replace an agent's version; one larger than max_bytes is not kept."""
        self.drop(agent)
        if version.num_bytes > self.max_bytes:
            return
        self._versions[agent] = version
        self._num_bytes += version.num_bytes
        while self._num_bytes > self.max_bytes:
            self.drop(next(iter(self._versions)))

    def get(self, agent: str, manifest: BlobRef) -> CachedVersion | None:
        """Return an agent's version; None if the cache has none, or one with another manifest."""
        found = self._versions.get(agent)
        if found is None or found.manifest != manifest:
            return None
        self._versions.move_to_end(agent)
        return found

    def drop(self, agent: str) -> None:
        """Drop an agent's version. May be repeated."""
        found = self._versions.pop(agent, None)
        if found is not None:
            self._num_bytes -= found.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A learner's weights and state in host memory, which later steps do not change, and its probes' logprobs.

    Attributes:
        config: rank, alpha and base model of the adapter.
        weights: the adapter's weights, by PEFT's names.
        state: the training state that belongs to the weights.
        probes: the pool's probes, with their logprobs under the weights.
        noise: mean |difference| between those logprobs in float32 and in the model's dtype.
    """

    config: AdapterConfig
    weights: dict[str, Tensor]
    state: TrainingState
    probes: tuple[Probe, ...]
    noise: float


def take_snapshot(learner: Learner, calibration: Calibration, result: StepResult) -> Snapshot:
    """Copy the learner's weights and state after a step, and measure its probes; runs on the compute thread."""
    probes, noise = learner.measure(sufficient_probes(calibration))
    return Snapshot(learner.config, learner.weights(), learner.state(result.step, result.consumed), probes, noise)


def contents_of(snapshot: Snapshot, calibration: Calibration, result: StepResult) -> VersionContents:
    """Serialise a version. Runs on another thread than the compute thread, which computes for other agents meanwhile."""
    return VersionContents(
        result=result,
        rank=snapshot.config.rank,
        files=write_adapter(snapshot.weights, snapshot.config),
        state=write_state(snapshot.state),
        digests=tensor_digests(snapshot.weights, snapshot.config.scaling),
        probes=snapshot.probes,
        # Rounding noise is larger under some adapters.
        probe_tolerance=max(calibration.tolerance, tolerance_of(snapshot.noise)),
    )

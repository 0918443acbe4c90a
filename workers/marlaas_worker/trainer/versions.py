"""Versions of an agent: built from a learner, committed, read from the blob store, and cached in host memory.

Bind and commit are the two compare-and-sets of an agent's policy key. A commit writes blobs under content names and sets the key; then
the caller acks the groups. If the process exits before the set, the old version stays current; the blobs are written again under the
same names, or never read. After the set, the record names the finished step, so the next trainer skips the step's groups.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from marlaas_api import wire
from marlaas_api.blobs import BlobMissing, BlobRef, Blobs
from marlaas_api.bus import Bucket, BusUnavailable
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import Calibration, Manifest, PolicyRecord, Probe, UntrainedStep
from marlaas_api.retries import patiently
from marlaas_worker.adapters import TENSORS_FILE, AdapterConfig, read_adapter, tensor_digests, write_adapter
from marlaas_worker.calibration import sufficient_probes, tolerance_of
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.assignment import Assignment, bound_record
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import FILENAME, StateInvalid, TrainingState, read_state, write_state
from marlaas_worker.trainer.view import PolicyEntry


@dataclass(frozen=True, slots=True)
class AgentLease:
    """The policy record that this trainer wrote last, and the key's revision after that write."""

    record: PolicyRecord
    revision: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """The step that produced a version.

    Attributes:
        version: the policy version.
        step: number of the optimizer step; -1 for version 0.
        consumed: names of the trained groups, by position.
        metrics: scalars of the step, by name.
        train_s: seconds that the trainer computed since the previous version.
    """

    version: int
    step: int = -1
    consumed: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class VersionContents:
    """Contents of a version, ready to be written.

    Attributes:
        result: the step that produced the version.
        rank: rank of the adapter.
        files: the adapter's files by name.
        state: the serialised training state.
        digests: by engine dtype, digest of the weights in an engine's slot (`adapters.tensor_digest`).
        probes: the pool's probes, with their logprobs under this version.
        probe_tolerance: largest mean |difference of logprobs| on the probes at which an engine agrees with the trainer.
    """

    result: StepResult
    rank: int
    files: dict[str, bytes]
    state: bytes
    digests: dict[str, str]
    probes: tuple[Probe, ...]
    probe_tolerance: float


class PolicyKey:
    """One agent's key in the bucket `policy`, for the trainer that holds or wants the agent's lease.

    Args:
        context: the trainer's name, clock and blob store.
        bucket: the bucket `policy`.
        assignment: the agent.
        retry_s: seconds before a call that failed is repeated.
    """

    def __init__(self, context: RoleContext, bucket: Bucket, assignment: Assignment, retry_s: float) -> None:
        self._context = context
        self._bucket = bucket
        self._assignment = assignment
        self._retry_s = retry_s

    async def bind(self, current: PolicyEntry | None) -> AgentLease:
        """Take the lease by a compare-and-set on `current`, the key as last read (None: it does not exist).

        Raises Overtaken if another trainer wrote the key first, and Unreadable if the current record cannot be parsed.
        """
        record = None if current is None else current.record
        if (
            record is None and current is not None and current.entry.data
        ):  # a cache keeps only data that it cannot parse
            record = wire.decode_as(PolicyRecord, current.entry.data, f"the PolicyRecord of key {current.entry.key}")
        bound = bound_record(record, self._assignment.ref.uid, self._context.name)
        lease = await self._set(bound, None if record is None or current is None else current.entry.revision)
        failpoint("trainer.bind.after_set")
        return lease

    async def release(self, lease: AgentLease) -> None:
        """Clear the holder, so that any trainer may bind the agent at once. Ignores a lost lease and an unreachable bus."""
        with contextlib.suppress(Overtaken, BusUnavailable):
            released = wire.encode(lease.record.model_copy(update={"holder": ""}))
            await FencedKey(self._bucket, self._assignment.policy_key, lease.revision).write(released)

    async def commit(self, lease: AgentLease, contents: VersionContents) -> AgentLease:
        """Make a version current, and return the lease at its new revision. Raises Overtaken: another trainer has the agent.

        Retries without limit while the blob store or the bus is unavailable; the contents do not change meanwhile.
        """
        failpoint("trainer.commit.before_blobs")
        manifest = await self._write_blobs(lease, contents)
        failpoint("trainer.commit.after_blobs")
        ref = await self._put(manifest.version, "manifest", wire.encode(manifest))
        failpoint("trainer.commit.after_manifest")
        update = {
            "version": manifest.version,
            "manifest": ref,
            "step": manifest.step,
            **self._stored(lease.record, manifest, ref),
        }
        committed = await self._set(lease.record.model_copy(update=update), lease.revision)
        failpoint("trainer.commit.after_set")
        return committed

    async def skip(self, lease: AgentLease, step: UntrainedStep) -> AgentLease:
        """Record that a step is finished but made no version, and return the lease at its new revision. Raises Overtaken."""
        training = self._assignment.document.spec.training
        # Older ones are left out, because the orchestrator has recorded them: at most this many groups are open, at least one a step.
        oldest = step.step - (training.max_staleness + 1) * training.groups_per_step
        kept = tuple(one for one in lease.record.untrained if one.step >= oldest)
        update = {"step": step.step, "untrained": (*kept, step)}
        return await self._set(lease.record.model_copy(update=update), lease.revision)

    def _stored(self, before: PolicyRecord, manifest: Manifest, ref: BlobRef) -> dict[str, object]:
        """Return the fields of the new record that count stored bytes. before: the last record. ref: reference of the manifest."""
        added = ref.size_bytes + sum(file.size_bytes for file in manifest.files.values())
        states = (*before.state_bytes, manifest.state.size_bytes if manifest.state else 0)
        kept = states[-self._assignment.document.spec.checkpoint.keep :]
        return {"adapter_bytes": before.adapter_bytes + added, "state_bytes": kept}

    async def tidy(self, record: PolicyRecord) -> None:
        """Delete the blobs of repeated commits of the record's version, and the training state that `checkpoint.keep` no longer covers.

        Safe without the lease: the manifest of a committed version never changes. Blobs of a later version whose commit was never
        finished are deleted with the job.
        """
        if record.manifest is None:
            return
        blobs = self._context.blobs
        manifest = await read_manifest(blobs, record.manifest)
        named = [record.manifest, *manifest.files.values(), *([manifest.state] if manifest.state else [])]
        needed = {ref.name for ref in named}
        for name in await blobs.list(self._assignment.adapter(record.version).blob_prefix):
            if name not in needed:
                await blobs.delete(name)
        await self.delete_state(record.version - self._assignment.document.spec.checkpoint.keep)

    async def delete_state(self, version: int) -> None:
        """Delete a version's training states, including those of failed commits; no later step needs them.

        Negative versions: do nothing.
        """
        if version < 0:
            return
        for name in await self._context.blobs.list(self._assignment.adapter(version).blob_prefix):
            if name.endswith(f"-{FILENAME}"):
                await self._context.blobs.delete(name)

    async def _write_blobs(self, lease: AgentLease, contents: VersionContents) -> Manifest:
        ref, result = self._assignment.ref, contents.result
        files = {name: await self._put(result.version, name, data) for name, data in contents.files.items()}
        state = await self._put(result.version, FILENAME, contents.state)
        return Manifest(
            namespace=ref.namespace,
            job=ref.name,
            uid=ref.uid,
            agent=self._assignment.agent.name,
            version=result.version,
            step=result.step,
            parent=lease.record.manifest,
            rank=contents.rank,
            files=files,
            state=state,
            tensor_digests=contents.digests,
            probes=contents.probes,
            probe_tolerance=contents.probe_tolerance,
            consumed=result.consumed,
            metrics=result.metrics,
            train_s=result.train_s,
            trainer=self._context.name,
            at=self._context.now(),
        )

    async def _put(self, version: int, filename: str, data: bytes) -> BlobRef:
        folder = self._assignment.adapter(version).blob_prefix
        return await patiently(
            lambda: self._context.blobs.put(folder, filename, data), f"{folder}/{filename}", self._retry_s
        )

    async def _set(self, record: PolicyRecord, revision: int | None) -> AgentLease:
        """Compare-and-set the key; while the bus is unavailable, repeat the same write. revision: None if there is no key."""
        data = wire.encode(record)
        name = self._assignment.policy_key
        # A key of its own for each write: a release must not follow a commit whose outcome is unknown.
        key = FencedKey(self._bucket, name, revision)
        await patiently(lambda: key.write(data), f"{name}: setting version {record.version}", self._retry_s)
        assert key.revision is not None
        return AgentLease(record, key.revision)


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

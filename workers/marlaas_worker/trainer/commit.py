"""The bind and the commit: the two compare-and-sets of an agent's policy key (DESIGN, "Identity and commits").

A commit is: blobs under content names, then the set, then (the caller's) acks. A crash before the set leaves the old version true, and
what was written is written again under the same names or never looked at; after the set the manifest says what was consumed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from marlaas_api import wire
from marlaas_api.blobs import BlobRef
from marlaas_api.bus import Bucket, BusUnavailable, Entry, RevisionConflict
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import Manifest, PolicyRecord, Probe
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.lease import bound_record
from marlaas_worker.trainer.state import FILENAME

log = logging.getLogger(__name__)
T = TypeVar("T")


class LeaseLost(Permanent):
    """Another trainer has bound the agent, or the job is gone: what is held of it here is worth nothing any more."""


@dataclass(frozen=True, slots=True)
class AgentLease:
    """What the policy key says since our last set, and its revision then."""

    record: PolicyRecord
    revision: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What made a version. step: -1 for version 0. consumed: names of the groups trained, by position. train_s: see `PolicyRecord`."""

    version: int
    step: int = -1
    consumed: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class VersionContents:
    """A version, ready to be written. files: the adapter's, by name. digests: `adapters.tensor_digests`."""

    result: StepResult
    rank: int
    files: dict[str, bytes]
    state: bytes
    digests: dict[str, str]
    probes: tuple[Probe, ...]
    probe_tolerance: float


async def patiently(call: Callable[[], Awaitable[T]], what: str, retry_s: float) -> T:
    """Call until it does not raise Retryable; the first time it does, say so."""
    complained = False
    while True:
        try:
            return await call()
        except Retryable as error:
            log.log(logging.DEBUG if complained else logging.WARNING, "%s: %s; trying on", what, error)
            complained = True
            await asyncio.sleep(retry_s)


class PolicyKey:
    """One agent's key in the bucket `policy`, as its trainer sees it."""

    def __init__(self, context: RoleContext, bucket: Bucket, assignment: Assignment, retry_s: float) -> None:
        self._context, self._bucket = context, bucket
        self._assignment, self._retry_s = assignment, retry_s

    async def bind(self, current: Entry | None) -> AgentLease:
        """Take the lease, over what `current` says. Raises LeaseLost if somebody was faster."""
        record = None if current is None or current.data is None else wire.decode_as(PolicyRecord, current.data)
        bound = bound_record(record, self._assignment.ref.uid, self._context.name)
        lease = await self._set(bound, 0 if record is None or current is None else current.revision)
        failpoint("trainer.bind.after_set")
        return lease

    async def release(self, lease: AgentLease) -> None:
        """Let any trainer take the agent at once; no error if one has it already, or if the bus cannot be reached."""
        with contextlib.suppress(RevisionConflict, BusUnavailable):
            released = wire.encode(lease.record.model_copy(update={"holder": ""}))
            await self._bucket.update(self._assignment.key, released, lease.revision)

    async def commit(self, lease: AgentLease, contents: VersionContents) -> AgentLease:
        """Make a version true; returns the lease at its new revision. Raises LeaseLost.

        A store or a server that does not answer is waited for: the contents do not change meanwhile.
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
            "train_s": contents.result.train_s,
        }
        committed = await self._set(lease.record.model_copy(update=update), lease.revision)
        failpoint("trainer.commit.after_set")
        return committed

    async def forget_state(self, version: int) -> None:
        """Delete the training states of a version that nobody goes on from, those of broken commits included."""
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
            trainer=self._context.name,
            at=self._context.now(),
        )

    async def _put(self, version: int, filename: str, data: bytes) -> BlobRef:
        folder = self._assignment.adapter(version).blob_prefix
        return await patiently(
            lambda: self._context.blobs.put(folder, filename, data), f"{folder}/{filename}", self._retry_s
        )

    async def _set(self, record: PolicyRecord, revision: int) -> AgentLease:
        """Compare-and-set; where the answer is lost, the key itself says whether our set took effect."""
        data, key = wire.encode(record), self._assignment.key
        while True:
            try:
                written = self._bucket.update(key, data, revision) if revision else self._bucket.create(key, data)
                return AgentLease(record, await written)
            except (RevisionConflict, BusUnavailable) as error:
                log.warning("%s: setting version %d: %s", key, record.version, error)
                found = await patiently(lambda: self._bucket.get(key), key, self._retry_s)
                if found is not None and found.data == data:
                    return AgentLease(record, found.revision)
                if isinstance(error, RevisionConflict):
                    raise LeaseLost(
                        f"{key}: another trainer has taken the lease (epoch {record.epoch} is past)"
                    ) from error
                await asyncio.sleep(self._retry_s)

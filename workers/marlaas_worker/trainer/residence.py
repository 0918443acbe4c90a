"""An agent's place in the trainer's memory: its learner exists while it has one."""

import asyncio
from functools import partial

from marlaas_api.blobs import BlobRef
from marlaas_api.messages import PolicyRecord
from marlaas_api.numeric import trained_bytes
from marlaas_worker.trainer.intake import StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.room import Pause
from marlaas_worker.trainer.trained_agent import TrainedAgent
from marlaas_worker.trainer.versions import CachedVersion, PastVersions, read_manifest, read_version


class Residence:
    """Asks for room, makes the learner, restores it, and closes it.

    changed: set when the agent may enter, or has to leave.
    """

    def __init__(self, agent: TrainedAgent, changed: asyncio.Event) -> None:
        self._agent = agent
        self._shared = agent.shared
        self._assignment = agent.assignment
        self._changed = changed
        self._made: list[Learner] = []
        self._wants_all = False
        self._past = PastVersions(agent.shared.context.blobs)
        self._reference_version = -1

    @property
    def is_here(self) -> bool:
        """Whether the agent has a learner."""
        return bool(self._made)

    @property
    def learner(self) -> Learner:
        """The learner of an agent that is here."""
        return self._made[-1]

    def enters(self, is_due: bool) -> bool:
        """Return whether there is room; if not, `changed` is set when there may be. is_due: see `room`."""
        return self._shared.room.enter(self._assignment.policy_key, self._need(), is_due, self._changed.set)

    def claim_all(self) -> bool:
        """Need the whole room at the next entry; return False, and need what the agent needs, if it is alone already."""
        self._wants_all = self._shared.room.is_shared
        return self._wants_all

    def share_again(self) -> None:
        """Need no more than the agent needs at the next entry."""
        self._wants_all = False

    def _need(self) -> int:
        if self._wants_all:
            return self._shared.room.size
        agent, spec = self._assignment.agent, self._assignment.document.spec
        if not agent.trainable:
            return 0
        bytes_per_rank = self._shared.memory.bytes_per_rank
        return trained_bytes(agent.adapter.rank, spec.num_copies(agent), bytes_per_rank)

    def must_leave(self, inbox: StepInbox) -> bool:
        """Return whether the agent has to leave the trainer's memory, because another one waits. inbox: its steps that are left to train. Raises LogInvalid."""
        return self._shared.room.pause(self._assignment.policy_key, pause_of(inbox))

    async def make_learner(self) -> Learner:
        """Make the learner of an agent that has entered."""
        await self._agent.compute(lambda: self._made.append(Learner(self._shared.model, self._assignment)))
        return self._made[-1]

    async def restore(self, manifest: BlobRef) -> None:
        """Make the learner, with a version's weights and training state.

        Raises:
            StateInvalid, WeightsMismatch and other Permanent errors: the version cannot be restored.
        """
        await self.make_learner()
        await self.reload(manifest)

    async def reload(self, manifest: BlobRef) -> None:
        """Load a version into the learner that is here. Raises as `restore`."""
        learner, versions = self.learner, self._shared.versions
        version = versions.get(self._assignment.policy_key, manifest)
        if version is None:
            version = await self._read(manifest)
            versions.put(self._assignment.policy_key, version)
        await self._agent.compute(lambda: learner.restore(version.weights, version.state))

    async def move_reference(self, record: PolicyRecord) -> None:
        """Load the KL reference of the next step, if it follows the policy. record: the committed version.

        The weights come from the blob store, so that a restart finds the same reference.
        """
        kl, newest = self._assignment.training.kl, record.manifest
        behind = kl.reference.versions_behind
        if behind is None or kl.coefficient == 0 or newest is None:
            return
        version = max(0, record.version - behind)
        if version == self._reference_version:
            return
        weights = await self._agent.patiently(partial(self._past.weights, newest, record.version, version))
        await self._agent.compute(partial(self.learner.refer_to, weights))
        self._reference_version = version

    async def _read(self, ref: BlobRef) -> CachedVersion:
        """Read a version from the blob store, waiting while it is unavailable."""
        blobs = self._shared.context.blobs

        async def read() -> CachedVersion:
            return CachedVersion(ref, *await read_version(blobs, await read_manifest(blobs, ref)))

        return await self._agent.patiently(read)

    async def leave(self) -> None:
        """Close the learner, also one whose making was cancelled, and free the room. May be repeated."""
        for learner in self._made:
            await self._agent.compute(learner.close)
        self._made.clear()
        self._reference_version = -1
        self._shared.room.leave(self._assignment.policy_key)


def pause_of(inbox: StepInbox) -> Pause:
    """Return what an agent with this inbox does next. Raises LogInvalid."""
    has_work = inbox.next_group() is not None or inbox.due() is not None
    if inbox.is_within_step:
        return Pause.BUSY if has_work else Pause.WITHIN_STEP
    return Pause.AFTER_STEP if has_work else Pause.BETWEEN_STEPS

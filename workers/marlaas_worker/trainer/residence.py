"""An agent's learner, which exists only while the agent has room in the trainer's memory (`room`)."""

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
    """Asks for room for an agent in the trainer's memory, and creates, restores and closes the agent's learner.

    An agent that has a learner is *here*.

    changed: event that is set when the agent may enter the memory, or has to leave it.
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
        """Return whether the agent has room now; if not, ask again once `changed` is set.

        is_due: whether the agent's step is closed and all groups of the step have arrived.
        """
        return self._shared.room.enter(self._assignment.policy_key, self._need(), is_due, self._changed.set)

    def claim_all(self) -> bool:
        """Require the whole room at the next entry if other agents share it now, else only the agent's own memory.

        Returns:
            Whether other agents share the room now.
        """
        self._wants_all = self._shared.room.is_shared
        return self._wants_all

    def share_again(self) -> None:
        """Require only the agent's own memory at the next entry."""
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
        """Return whether the agent has to leave the trainer's memory for another one. inbox: the agent's open steps. Raises LogInvalid."""
        return self._shared.room.pause(self._assignment.policy_key, pause_of(inbox))

    async def make_learner(self) -> Learner:
        """Create and return the learner of an agent that has entered."""
        await self._agent.compute(lambda: self._made.append(Learner(self._shared.model, self._assignment)))
        return self._made[-1]

    async def restore(self, manifest: BlobRef) -> None:
        """Create the learner, and load a version's weights and training state. manifest: the version's.

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
        """Load the KL reference of the next step, if it moves with the policy (`versionsBehind`). record: of the committed version.

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
        """Close the learner, also one whose creation was cancelled, and free the room. May be repeated."""
        for learner in self._made:
            await self._agent.compute(learner.close)
        self._made.clear()
        self._reference_version = -1
        self._shared.room.leave(self._assignment.policy_key)


def pause_of(inbox: StepInbox) -> Pause:
    """Return what an agent does next, for `AgentRoom.pause`: whether it has a group to train or a step to close, and whether a step is begun.

    inbox: the agent's open steps. Raises LogInvalid if the next message contradicts the committed step or the other messages of its step.
    """
    has_work = inbox.next_group() is not None or inbox.due() is not None
    if inbox.is_within_step:
        return Pause.BUSY if has_work else Pause.WITHIN_STEP
    return Pause.AFTER_STEP if has_work else Pause.BETWEEN_STEPS

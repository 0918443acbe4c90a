"""One agent's training while it is bound: restore, replay, accumulate, step, commit, ack.

However the training ends, all progress is in the committed version and the log of groups; a later bind continues from them.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from marlaas_api.background import background
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.errors import Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import AgentClosed, GroupReady, PolicyRecord, UntrainedCause, UntrainedStep
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.trainer.accumulation import Accumulation, DoesNotFit
from marlaas_worker.trainer.batching import Row
from marlaas_worker.trainer.intake import Intake, StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.memory import RowTooLarge, lowered_budget
from marlaas_worker.trainer.residence import Residence
from marlaas_worker.trainer.trained_agent import Binding, TrainedAgent
from marlaas_worker.trainer.trajectories import (
    Expectation,
    Trajectory,
    TrajectoryInvalid,
    TurnMissing,
    read_group,
)
from marlaas_worker.trainer.versions import (
    CachedVersion,
    PolicyKey,
    StepResult,
    contents_of,
    known_adapters,
    read_manifest,
    take_snapshot,
)

_METRICS_OF_UNTRAINED = frozenset({"tokens", "masked_fraction", "behaviour_kl", "overlong_filtered", "out_of_memory"})
"""Metrics that are recorded for a step that trained no token. Few, because they are part of the policy record."""
_WHY_UNTRAINED = {
    UntrainedCause.FILTERED: "training.overlong.filter left out all replies, which end at a limit of tokens or turns; raise rollout.maxTokens or rollout.maxTurns",
    UntrainedCause.EMPTY: "no reply has a token; the prompts may leave no room in the context window",
    UntrainedCause.MASKED: "training.correction left out all tokens, on which sampler and trainer disagree; see behaviour_kl in the step's metrics",
}


class AgentTrainer:
    """Training of a bound agent, from its bind until it is released.

    Args:
        agent: the trainer's state of the agent.
        binding: the agent's lease, and the signals by which the trainer asks it to leave.
        policy: the agent's policy key, with which versions are committed.
    """

    def __init__(self, agent: TrainedAgent, binding: Binding, policy: PolicyKey) -> None:
        self._agent = agent
        self._binding = binding
        self._policy = policy
        self._shared = agent.shared
        self._assignment = agent.assignment
        self._spec = agent.assignment.document.spec
        self._adapters: dict[int, str] = {}
        """The adapter file's sha256 by version."""
        self._accumulation = Accumulation(agent)
        self._residence = Residence(agent, binding.changed)
        self._computed_s = agent.account.busy_s
        """Seconds of computation until the last finished step."""
        self._num_redone = 0
        self._num_tidied = 0

    @property
    def _record(self) -> PolicyRecord:
        """The last committed policy record."""
        return self._binding.lease.record

    async def run(self) -> None:
        """Train until cancelled or asked to leave; for a frozen agent, return after version 0.

        Raises:
            Overtaken: another trainer has the agent.
            Permanent: the training data, or the version to continue from, is invalid.
        """
        try:
            if self._record.manifest is None:
                await self._begin()
            else:
                await self._resume(self._record.manifest)
            await self._tidy()
            if self._assignment.agent.trainable and not self._binding.is_leaving:
                await self._train()
        finally:
            self._binding.is_releasing = True
            self._shared.compute.queue.hold(self._agent.account, False)
            self._shared.versions.drop(self._assignment.policy_key)
            await self._residence.leave()

    async def _begin(self) -> None:
        """Publish version 0, once there is room for the agent. If the agent has to leave while it waits for room, publish nothing."""
        while not self._residence.enters(is_due=True):
            await self._binding.changed.wait()
            self._binding.changed.clear()
            if self._binding.is_leaving:
                return
        learner = await self._residence.make_learner()
        for remark in await self._agent.compute(learner.begin):
            await self._agent.emit("BaseModelDiffers", remark)
        await self._publish(learner, StepResult(version=0))

    async def _resume(self, ref: BlobRef) -> None:
        """Restore baselines and the list of known adapters from the committed version, whose manifest is `ref`.

        The learner is restored when the agent has work, like that of a parked agent.
        """
        blobs, staleness = self._shared.context.blobs, self._spec.training.max_staleness
        manifest = await self._agent.patiently(lambda: read_manifest(blobs, ref))
        self._accumulation.baselines.restore(manifest.metrics)
        self._adapters = await self._agent.patiently(lambda: known_adapters(blobs, manifest, staleness))
        await self._agent.emit("AgentBound", f"continues from version {manifest.version}")

    async def _train(self) -> None:
        inbox = StepInbox(self._record.step, self._record.version)
        changed = self._binding.changed
        intake = Intake(self._agent, inbox, changed)
        await intake.replay()
        if self._residence.is_here:
            await self._residence.move_reference(self._record)
        async with background(intake.follow()):
            while not (self._binding.is_leaving and not inbox.is_within_step):
                changed.clear()
                self._shared.compute.queue.hold(self._agent.account, bool(inbox))
                if await self._enter_or_leave(inbox) and await self._advance(inbox, intake):
                    continue
                if not self._binding.is_leaving or inbox.is_within_step:
                    await changed.wait()

    async def _enter_or_leave(self, inbox: StepInbox) -> bool:
        """Load the agent into the trainer's memory if it has work and there is room, or park it if another agent needs the room.

        Returns:
            Whether the agent is in the memory afterwards.
        """
        if self._residence.is_here:
            if not self._residence.must_leave(inbox):
                return True
            await self._park(inbox)
        if not inbox or not self._residence.enters(inbox.is_complete):
            return False
        await self._residence.restore(self._committed())
        await self._residence.move_reference(self._record)
        return True

    async def _park(self, inbox: StepInbox) -> None:
        """Free the agent's memory for another one. Its state is the committed version; a step that has begun starts again."""
        self._rewind(inbox)
        self._agent.num_parked += 1
        await self._residence.leave()

    def _rewind(self, inbox: StepInbox) -> None:
        """Restart the open step at its first group."""
        self._accumulation.rewind()
        inbox.rewind()

    def _committed(self) -> BlobRef:
        ref = self._record.manifest
        assert ref is not None, "an agent trains after its first version"
        return ref

    async def _advance(self, inbox: StepInbox, intake: Intake) -> bool:
        """Train the next group, or finish the step if all of its groups are trained; return False if neither is possible yet."""
        learner = self._residence.learner
        try:
            if (group := inbox.next_group()) is not None:
                await self._accumulation.add(learner, await self._read(group), group.step, self._record.version)
                inbox.take(group)
            elif (closed := inbox.due()) is not None:
                await self._finish(learner, closed, inbox.consumed())
                inbox.commit(closed.step, self._record.version)
                self._residence.share_again()
                await intake.ack()
                failpoint("trainer.commit.after_acks")
                await self._tidy()
                await self._residence.move_reference(self._record)
            else:
                return False
        except DoesNotFit as error:
            await self._redo(learner, inbox, error.rows)
        return True

    async def _redo(self, learner: Learner, inbox: StepInbox, rows: Sequence[Row]) -> None:
        """Restart the step with a lower token budget after a micro-batch of these rows did not fit. The step's groups are read again.

        A single conversation that does not fit beside other agents gets the memory of all of them, for one step. Raises RowTooLarge.
        """
        before = learner.token_budget
        try:
            budget = lowered_budget(before, rows)
        except RowTooLarge as error:
            if not self._residence.claim_all():
                raise
            await self._park(inbox)
            text = f"the step restarts once the other agents of the trainer are parked, because {error}"
        else:
            if learner.has_moved:
                await self._residence.reload(self._committed())
            learner.token_budget = budget
            self._rewind(inbox)
            text = f"the step restarts with micro-batches of {budget} tokens instead of {before}, as do later steps"
        self._num_redone += 1
        self._agent.num_out_of_memory += 1
        await self._agent.emit("OutOfMemory", f"out of memory: {text}")

    async def _finish(self, learner: Learner, closed: AgentClosed, consumed: tuple[str, ...]) -> None:
        """Run backward for the remaining rows, take the last update, and commit the new version.

        If no token was trained and the step may be skipped (`_may_skip`), commit only the step's number.

        Args:
            closed: the step's closing message.
            consumed: names of the step's groups, by position.
        """
        await self._accumulation.complete(learner, closed.step)
        version = self._record.version + 1
        cause = learner.why_untrained(self._accumulation.num_filtered) if self._may_skip(closed) else None
        metrics = await self._agent.compute(partial(learner.step, closed.step, self._accumulation.num_groups))
        metrics["out_of_memory"] = float(self._num_redone)
        metrics |= self._accumulation.finish_step(is_trained=cause is None)
        self._num_redone = 0
        computed_s = self._agent.account.busy_s
        train_s = computed_s - self._computed_s
        self._computed_s = computed_s
        if cause is not None:
            told = {name: value for name, value in metrics.items() if name in _METRICS_OF_UNTRAINED}
            untrained = UntrainedStep(step=closed.step, cause=cause, metrics=told, train_s=train_s)
            self._binding.lease = await self._policy.skip(self._binding.lease, untrained)
            text = f"step {closed.step} trained no token and made no version: {_WHY_UNTRAINED[cause]}"
            await self._agent.emit("NothingTrained", text)
            return
        await self._publish(learner, StepResult(version, closed.step, consumed, metrics, train_s))
        if metrics["skipped_update"]:
            self._agent.num_skipped += 1
            text = _not_finite(closed.step, version, int(metrics["skipped_update"]), int(metrics["updates"]))
            await self._agent.emit("UpdateSkipped", text)

    def _may_skip(self, closed: AgentClosed) -> bool:
        """Return whether a step may end without a version.

        In a strict job of several policies it may not, because turns of the next step are already pinned to the step's version.
        Orchestrators of earlier releases (no `follows`) expect a version of every step.
        """
        is_pinned = self._spec.training.max_staleness == 0 and len(self._spec.policies) > 1
        ends_sft = closed.step == self._spec.demonstrated_steps - 1  # Its version holds the KL reference.
        return closed.follows is not None and not is_pinned and not ends_sft

    async def _publish(self, learner: Learner, result: StepResult) -> None:
        calibration = self._shared.calibration
        snapshot = await self._agent.compute(partial(take_snapshot, learner, calibration, result))
        contents = await asyncio.to_thread(contents_of, snapshot, calibration, result)
        self._binding.lease = await self._policy.commit(self._binding.lease, contents)
        version = CachedVersion(self._committed(), snapshot.weights, snapshot.state)
        self._shared.versions.put(self._assignment.policy_key, version)
        self._agent.num_commits += 1
        self._shared.context.waits.over(self._assignment.ref.uid, self._assignment.policy_key)
        self._adapters[result.version] = await asyncio.to_thread(sha256_hex, contents.files[TENSORS_FILE])
        await self._agent.emit("VersionCommitted", f"version {result.version} of step {result.step}")

    async def _read(self, group: GroupReady) -> list[Trajectory]:
        """Read the group's trajectories. A missing turn is retried for missing_turn_s; outages do not count. Raises TrajectoryInvalid."""
        context, rollout = self._shared.context, self._spec.rollout
        expected = Expectation(
            temperature=rollout.temperature,
            vocab_size=self._shared.model.vocab_size,
            adapters=self._adapters,
            refreshes=rollout.refresh == "turn",
            is_demonstrated=group.step < self._spec.demonstrated_steps,
            teacher=self._spec.teacher,
        )
        missing_since: float | None = None

        async def read() -> list[Trajectory]:
            nonlocal missing_since
            try:
                return await read_group(context.bus, context.blobs, group, expected)
            except TurnMissing as error:
                missing_since = context.now() if missing_since is None else missing_since
                waited = context.now() - missing_since
                if waited >= self._shared.timing.missing_turn_s:
                    raise TrajectoryInvalid(f"{error}, also {waited:.0f} s after the first read") from error
                raise
            except Retryable:
                missing_since = None  # an outage, after which a replica of the bus may lag behind for a moment
                raise

        return await self._agent.patiently(read)

    async def _tidy(self) -> None:
        """Delete the training state that checkpoint.keep no longer covers.

        After the bind and the first commit, also delete blobs of repeated commits of the current version.
        """
        record = self._record
        self._num_tidied += 1
        if self._num_tidied <= 2:
            await self._agent.patiently(lambda: self._policy.tidy(record))
        else:
            outdated = record.version - self._spec.checkpoint.keep
            await self._agent.patiently(lambda: self._policy.delete_state(outdated))


def _not_finite(step: int, version: int, num_skipped: int, num_updates: int) -> str:
    if num_skipped == num_updates:
        return f"the gradient of step {step} is not finite: version {version} has the weights of version {version - 1}"
    return f"{num_skipped} of the {num_updates} gradients of step {step} are not finite: version {version} is made by the others"

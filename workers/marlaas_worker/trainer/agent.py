"""One agent's training while it is bound: restore, replay, accumulate, step, commit, ack.

However it ends, all progress is in the committed version and the log of groups; a later bind continues from them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from marlaas_api.background import background
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.errors import Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import GroupReady, StepClosed, UntrainedCause, UntrainedStep
from marlaas_api.retries import patiently
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.trainer.accumulation import Accumulation, DoesNotFit
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.commit import AgentLease, PolicyKey, StepResult
from marlaas_worker.trainer.intake import Intake, StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.memory import RowTooLarge, lowered_budget
from marlaas_worker.trainer.residence import Residence
from marlaas_worker.trainer.rows import Row
from marlaas_worker.trainer.shared import TrainerDependencies
from marlaas_worker.trainer.trajectories import (
    Expectation,
    Trajectory,
    TrajectoryInvalid,
    TurnMissing,
    read_group,
)
from marlaas_worker.trainer.version_cache import CachedVersion
from marlaas_worker.trainer.versions import contents_of, known_adapters, read_manifest, take_snapshot

T = TypeVar("T")
_METRICS_OF_UNTRAINED = frozenset({"tokens", "masked_fraction", "behaviour_kl", "overlong_filtered", "out_of_memory"})
"""Few, because they are part of the policy record."""
_WHY_UNTRAINED = {
    UntrainedCause.FILTERED: "training.overlong.filter left out all replies, which end at a limit of tokens or turns; raise rollout.maxTokens or rollout.maxTurns",
    UntrainedCause.EMPTY: "no reply has a token; the prompts may leave no room in the context window",
    UntrainedCause.MASKED: "training.correction left out all tokens, on which sampler and trainer disagree; see behaviour_kl in the step's metrics",
}


class AgentTrainer:
    """Training of a bound agent.

    lease: the last committed policy record. is_releasing: set once `run` begins to release resources; never reset.
    """

    def __init__(
        self, dependencies: TrainerDependencies, assignment: Assignment, policy: PolicyKey, lease: AgentLease
    ) -> None:
        self.lease = lease
        self.is_releasing = False
        self._dependencies, self._assignment, self._policy = dependencies, assignment, policy
        self._spec = assignment.document.spec
        self._adapters: dict[int, str] = {}
        self._accumulation = Accumulation(dependencies, assignment)
        self._computed_s = self._busy_s()
        self._num_redone = 0
        self._num_tidied = 0
        self.is_leaving = False
        self._changed = asyncio.Event()
        self._residence = Residence(dependencies, assignment, self._changed)

    def leave(self) -> None:
        """Let `run` return at the next step boundary, so that another trainer goes on."""
        self.is_leaving = True
        self._changed.set()

    async def run(self) -> None:
        """Train until cancelled or asked to leave; for a frozen agent, return after version 0.

        Raises:
            Overtaken: another trainer has the agent.
            Permanent: the training data, or the version to continue from, is invalid.
        """
        try:
            if self.lease.record.manifest is None:
                await self._begin()
            else:
                await self._resume(self.lease.record.manifest)
            await self._tidy()
            if self._assignment.agent.trainable and not self.is_leaving:
                await self._train()
        finally:
            self.is_releasing = True
            self._dependencies.compute.queue.hold(self._assignment.account, False)
            self._dependencies.versions.drop(self._assignment.policy_key)
            await self._residence.leave()

    async def _begin(self) -> None:
        """Publish version 0, once there is room for the agent."""
        while not self._residence.enters(is_due=True):
            await self._changed.wait()
            self._changed.clear()
            if self.is_leaving:
                return
        learner = await self._residence.make_learner()
        for remark in await self._compute(learner.begin):
            await self._dependencies.emit(self._assignment, "BaseModelDiffers", remark)
        await self._publish(learner, StepResult(version=0))

    async def _resume(self, ref: BlobRef) -> None:
        """Continue from the committed version. Like a parked agent, it enters the memory when it has work."""
        blobs, staleness = self._dependencies.context.blobs, self._spec.training.max_staleness
        manifest = await self._patiently(lambda: read_manifest(blobs, ref))
        self._accumulation.baselines.restore(manifest.metrics)
        self._adapters = await self._patiently(lambda: known_adapters(blobs, manifest, staleness))
        await self._dependencies.emit(self._assignment, "AgentBound", f"continues from version {manifest.version}")

    async def _park(self, inbox: StepInbox) -> None:
        """Free the agent's memory for another one. Its state is the committed version; a step that has begun starts again."""
        self._forget_step(inbox)
        self._dependencies.parked[self._assignment.policy_key] += 1
        await self._residence.leave()

    def _committed(self) -> BlobRef:
        ref = self.lease.record.manifest
        assert ref is not None, "an agent trains after its first version"
        return ref

    async def _unpark(self) -> None:
        await self._residence.restore(self._committed())
        await self._residence.move_reference(self.lease.record)

    async def _train(self) -> None:
        inbox = StepInbox(self.lease.record.step, self.lease.record.version)
        intake = Intake(self._dependencies, self._assignment, inbox, self._changed)
        await intake.replay()
        if self._residence.is_here:
            await self._residence.move_reference(self.lease.record)
        async with background(intake.follow()):
            while not (self.is_leaving and not inbox.is_within_step):
                self._changed.clear()
                self._dependencies.compute.queue.hold(self._assignment.account, bool(inbox))
                if await self._enter_or_leave(inbox) and await self._advance(inbox, intake):
                    continue
                if not self.is_leaving or inbox.is_within_step:
                    await self._changed.wait()

    async def _enter_or_leave(self, inbox: StepInbox) -> bool:
        """Enter the memory if there is work, or leave it if another agent needs it; return whether the agent is there."""
        if self._residence.is_here:
            if not self._residence.must_leave(inbox):
                return True
            await self._park(inbox)
        if not inbox or not self._residence.enters(inbox.is_complete):
            return False
        await self._unpark()
        return True

    async def _advance(self, inbox: StepInbox, intake: Intake) -> bool:
        """Train the next group, or finish the step that is due; return False if there is neither."""
        learner = self._residence.learner
        try:
            return await self._advance_with(learner, inbox, intake)
        except DoesNotFit as error:
            await self._redo(learner, inbox, error.rows)
            return True

    async def _advance_with(self, learner: Learner, inbox: StepInbox, intake: Intake) -> bool:
        """See `_advance`. Raises DoesNotFit."""
        if (group := inbox.next_group()) is not None:
            await self._accumulation.add(learner, await self._read(group), group.step, self.lease.record.version)
            inbox.take(group)
        elif (closed := inbox.due()) is not None:
            await self._finish(learner, closed, inbox.consumed())
            inbox.commit(closed.step, self.lease.record.version)
            self._residence.share_again()
            await intake.settle()
            failpoint("trainer.commit.after_acks")
            await self._tidy()
            await self._residence.move_reference(self.lease.record)
        else:
            return False
        return True

    async def _redo(self, learner: Learner, inbox: StepInbox, rows: Sequence[Row]) -> None:
        """Restart the step with a lower token budget; its groups are read again, so none is kept in memory.

        A single conversation that does not fit beside other agents gets the memory of all of them, for one step. Raises RowTooLarge.
        """
        before = learner.token_budget
        try:
            learner.token_budget = lowered_budget(before, rows)
        except RowTooLarge as error:
            if not self._residence.claim_all():
                raise
            await self._redo_alone(inbox, error)
            return
        budget = learner.token_budget
        if learner.has_moved:
            await self._residence.reload(self._committed())
            learner.token_budget = budget
        self._forget_step(inbox)
        self._count_redone()
        text = f"out of memory: the step restarts with micro-batches of {budget} tokens instead of {before}, as do later steps"
        await self._dependencies.emit(self._assignment, "OutOfMemory", text)

    async def _redo_alone(self, inbox: StepInbox, error: RowTooLarge) -> None:
        await self._park(inbox)
        self._count_redone()
        text = f"out of memory: the step restarts once the other agents of the trainer are parked, because {error}"
        await self._dependencies.emit(self._assignment, "OutOfMemory", text)

    def _count_redone(self) -> None:
        self._num_redone += 1
        self._dependencies.out_of_memory[self._assignment.policy_key] += 1

    def _forget_step(self, inbox: StepInbox) -> None:
        """Return to the first group of the step."""
        self._accumulation.rewind()
        inbox.rewind()

    async def _finish(self, learner: Learner, closed: StepClosed, consumed: tuple[str, ...]) -> None:
        """Run backward for the remaining rows, take the optimizer step, and commit; without a trained token, only the step's number."""
        await self._accumulation.complete(learner, closed.step)
        version = self.lease.record.version + 1
        cause = learner.why_untrained(self._accumulation.num_filtered) if self._may_skip(closed) else None
        metrics = await self._compute(partial(learner.step, closed.step, self._accumulation.num_groups))
        metrics["out_of_memory"], self._num_redone = float(self._num_redone), 0
        metrics |= self._accumulation.finish_step(is_trained=cause is None)
        train_s, self._computed_s = self._busy_s() - self._computed_s, self._busy_s()
        if cause is not None:
            told = {name: value for name, value in metrics.items() if name in _METRICS_OF_UNTRAINED}
            untrained = UntrainedStep(step=closed.step, cause=cause, metrics=told, train_s=train_s)
            self.lease = await self._policy.skip(self.lease, untrained)
            text = f"step {closed.step} trained no token and made no version: {_WHY_UNTRAINED[cause]}"
            await self._dependencies.emit(self._assignment, "NothingTrained", text)
            return
        await self._publish(learner, StepResult(version, closed.step, consumed, metrics, train_s))
        if metrics["skipped_update"]:
            self._dependencies.skipped[self._assignment.policy_key] += 1
            text = _not_finite(closed.step, version, int(metrics["skipped_update"]), int(metrics["updates"]))
            await self._dependencies.emit(self._assignment, "UpdateSkipped", text)

    def _may_skip(self, closed: StepClosed) -> bool:
        """Return whether a step may end without a version.

        In a strict job of several policies, the turns of the next step are already pinned to its version. Orchestrators of earlier
        releases (no `follows`) expect one.
        """
        is_pinned = self._spec.training.max_staleness == 0 and len(self._spec.policies) > 1
        ends_sft = closed.step == self._spec.demonstrated_steps - 1  # Its version holds the KL reference.
        return closed.follows is not None and not is_pinned and not ends_sft

    async def _publish(self, learner: Learner, result: StepResult) -> None:
        calibration = self._dependencies.calibration
        snapshot = await self._compute(partial(take_snapshot, learner, calibration, result))
        contents = await asyncio.to_thread(contents_of, snapshot, calibration, result)
        self.lease = await self._policy.commit(self.lease, contents)
        if self.lease.record.manifest is not None:
            version = CachedVersion(self.lease.record.manifest, snapshot.weights, snapshot.state)
            self._dependencies.versions.keep(self._assignment.policy_key, version)
        self._dependencies.commits[self._assignment.policy_key] += 1
        self._dependencies.context.waits.over(self._assignment.ref.uid, self._assignment.policy_key)
        self._adapters[result.version] = await asyncio.to_thread(sha256_hex, contents.files[TENSORS_FILE])
        await self._dependencies.emit(
            self._assignment, "VersionCommitted", f"version {result.version} of step {result.step}"
        )

    async def _read(self, group: GroupReady) -> list[Trajectory]:
        """Read the group's trajectories. A missing turn is retried for missing_turn_s; outages do not count. Raises TrajectoryInvalid."""
        context = self._dependencies.context
        rollout, vocab_size = self._spec.rollout, self._dependencies.model.vocab_size
        is_demonstrated = group.step < self._spec.demonstrated_steps
        refreshes = rollout.refresh == "turn"
        expected = Expectation(rollout.temperature, vocab_size, self._adapters, refreshes, is_demonstrated)
        missing_since: float | None = None

        async def read() -> list[Trajectory]:
            nonlocal missing_since
            try:
                return await read_group(context.bus, context.blobs, group, expected)
            except TurnMissing as error:
                missing_since = context.now() if missing_since is None else missing_since
                waited = context.now() - missing_since
                if waited >= self._dependencies.timing.missing_turn_s:
                    raise TrajectoryInvalid(f"{error}, also {waited:.0f} s after the first read") from error
                raise
            except Retryable:
                missing_since = None  # an outage, after which a replica of the bus may lag behind for a moment
                raise

        return await self._patiently(read)

    async def _tidy(self) -> None:
        """Delete the training state that checkpoint.keep no longer covers.

        After the bind and the first commit, also delete blobs of repeated commits of the current version.
        """
        record, self._num_tidied = self.lease.record, self._num_tidied + 1
        if self._num_tidied <= 2:
            await self._patiently(lambda: self._policy.tidy(record))
        else:
            await self._patiently(lambda: self._policy.forget_state(record.version - self._spec.checkpoint.keep))

    def _busy_s(self) -> float:
        return self._dependencies.compute.busy_s_of(self._assignment.account)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await self._dependencies.compute.run(work, self._assignment.account)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, self._assignment.policy_key, self._dependencies.timing.retry_s)


def _not_finite(step: int, version: int, num_skipped: int, num_updates: int) -> str:
    if num_skipped == num_updates:
        return f"the gradient of step {step} is not finite: version {version} has the weights of version {version - 1}"
    return f"{num_skipped} of the {num_updates} gradients of step {step} are not finite: version {version} is made by the others"

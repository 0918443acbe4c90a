"""One agent's training while it is bound: restore, replay, accumulate, step, commit, ack.

Whatever ends it, the committed version and the log of groups are all that counts: a later bind goes on from them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from marlaas_api.background import background
from marlaas_api.blobs import sha256_hex
from marlaas_api.errors import Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import GroupReady, StepClosed
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.batching import pack
from marlaas_worker.trainer.commit import Lease, PolicyKey, StepResult, patiently
from marlaas_worker.trainer.inbox import StepInbox
from marlaas_worker.trainer.intake import Intake
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.rows import Row, plant
from marlaas_worker.trainer.shared import Shared
from marlaas_worker.trainer.trajectories import (
    Expectation,
    Trajectory,
    TrajectoryInvalid,
    TurnMissing,
    Weighing,
    read_group,
    segments_of,
)
from marlaas_worker.trainer.versions import PastVersions, contents_of, known_adapters, read_manifest, read_version

T = TypeVar("T")


def weighing(spec: RLJobSpec) -> Weighing:
    """How a job's rewards become advantages: what it says, and else what its algorithm says."""
    rule, max_tokens = ALGORITHMS[spec.training.algorithm], spec.rollout.max_tokens
    overlong = spec.training.overlong
    tokens = int(rule.overlong * max_tokens) if overlong.tokens is None else overlong.tokens
    return Weighing(rule.advantage, max_tokens, tokens, overlong.filter)


class AgentTraining:
    """A bound agent. `lease` says what is true of it; `over`, that nothing more is trained and what it holds is being given back."""

    def __init__(self, shared: Shared, assignment: Assignment, policy: PolicyKey, lease: Lease) -> None:
        self.lease = lease
        self.over = False
        self._shared, self._assignment, self._policy = shared, assignment, policy
        self._spec = assignment.document.spec
        self._adapters: dict[int, str] = {}
        self._rule = ALGORITHMS[self._spec.training.algorithm]
        self._weighing = weighing(self._spec)
        self._kl = self._spec.training.kl
        self._past, self._reference_version = PastVersions(shared.context.blobs), -1
        self._held: list[list[Trajectory]] = []
        self._pending: list[Row] = []
        self._num_filtered = 0
        self._computed_s = self._busy_s()

    async def run(self) -> None:
        """Train until cancelled; a frozen agent is done with version 0.

        Raises:
            LeaseLost: another trainer has the agent.
            Permanent: what it has to train on, or to go on from, is broken.
        """
        made: list[Learner] = []
        try:
            await self._compute(lambda: made.append(Learner(self._shared.model, self._assignment)))
            (learner,) = made
            await self._restore(learner)
            if self._assignment.agent.trainable:
                await self._train(learner)
        finally:
            self.over = True
            for learner in made:  # also one whose making was cancelled: the thread has made it all the same
                await self._compute(learner.close)

    async def _restore(self, learner: Learner) -> None:
        """Take up the committed version, or publish version 0."""
        blobs, ref = self._shared.context.blobs, self.lease.record.manifest
        if ref is None:
            await self._compute(learner.begin)
            await self._publish(learner, StepResult(version=0))
            return
        manifest = await self._patiently(lambda: read_manifest(blobs, ref))
        weights, state = await self._patiently(lambda: read_version(blobs, manifest))
        await self._compute(lambda: learner.restore(weights, state))
        staleness = self._spec.training.max_staleness
        self._adapters = await self._patiently(lambda: known_adapters(blobs, manifest, staleness))
        await self._forget_state()
        await self._shared.tell(self._assignment, "AgentBound", f"goes on from version {manifest.version}")

    async def _train(self, learner: Learner) -> None:
        inbox = StepInbox(self.lease.record.step, self.lease.record.version)
        intake = Intake(self._shared, self._assignment, inbox)
        await intake.replay()
        await self._move_reference(learner)
        async with background(intake.follow()):
            while True:
                intake.changed.clear()
                if (group := inbox.next_group()) is not None:
                    await self._accumulate(learner, group)
                    inbox.take(group)
                elif (closed := inbox.due()) is not None:
                    await self._finish(learner, closed, inbox.consumed())
                    inbox.commit(closed.step)
                    await intake.settle()
                    failpoint("trainer.commit.after_acks")
                    await self._forget_state()
                    await self._move_reference(learner)
                else:
                    await intake.changed.wait()

    async def _accumulate(self, learner: Learner, group: GroupReady) -> None:
        """Backward of every micro-batch that the group fills; the rest waits for the next group, or for the step if rewards are compared across it."""
        trajectories = await self._read(group)
        if self._kl.coefficient > 0 and self._kl.added_to == "reward":
            trajectories = await self._less_kl(learner, trajectories)
        self._num_filtered += sum(not self._weighing.trains(member) for member in trajectories)
        self._held.append(trajectories)
        if self._rule.over == "group":
            await self._learn(learner)

    async def _less_kl(self, learner: Learner, group: Sequence[Trajectory]) -> list[Trajectory]:
        """The group with its rewards lowered by the KL of each trajectory; micro-batches of this group alone, so the sums depend on nothing else."""
        pairs_per_token, budget = self._shared.model.pairs_per_token, self._spec.training.microbatch_tokens
        parts = [segments_of(member.turns, member.leaves, 0.0, number) for number, member in enumerate(group)]
        full, rest = pack([], plant([part for each in parts for part in each], pairs_per_token, budget), budget)
        kl = [0.0] * len(group)
        for batch in [*full, rest] if rest else full:
            sums = await self._compute(partial(learner.kl_by_trajectory, batch, len(group)))
            kl = [before + float(more) for before, more in zip(kl, sums, strict=True)]
        return [
            replace(member, reward=member.reward - self._kl.coefficient * cost)
            for member, cost in zip(group, kl, strict=True)
        ]

    async def _move_reference(self, learner: Learner) -> None:
        """Take up the KL reference of the step to come, if it follows the policy; read from the store, so a restart finds the same one."""
        behind, record = self._kl.reference.versions_behind, self.lease.record
        if behind is None or self._kl.coefficient == 0 or record.manifest is None:
            return
        newest, version = record.manifest, max(0, record.version - behind)
        if version != self._reference_version:
            weights = await self._patiently(lambda: self._past.weights(newest, record.version, version))
            await self._compute(partial(learner.refer_to, weights))
            self._reference_version = version

    async def _learn(self, learner: Learner) -> None:
        """Backward of every micro-batch that the held groups fill."""
        groups, self._held = self._weighing.segments(self._held), []
        pairs_per_token, budget = self._shared.model.pairs_per_token, self._spec.training.microbatch_tokens
        rows = [row for segments in groups for row in plant(segments, pairs_per_token, budget)]
        full, self._pending = pack(self._pending, rows, budget)
        for batch in full:
            await self._compute(partial(learner.accumulate, batch))

    async def _finish(self, learner: Learner, closed: StepClosed, consumed: tuple[str, ...]) -> None:
        """Backward of what is left, the optimizer step, the commit."""
        if self._held:
            await self._learn(learner)
        if self._pending:
            await self._compute(partial(learner.accumulate, self._pending))
            self._pending = []
        version = self.lease.record.version
        metrics = await self._compute(partial(learner.step, version))
        metrics["overlong_filtered"], self._num_filtered = float(self._num_filtered), 0
        train_s, self._computed_s = self._busy_s() - self._computed_s, self._busy_s()
        await self._publish(learner, StepResult(version + 1, closed.step, consumed, metrics, train_s))

    async def _publish(self, learner: Learner, result: StepResult) -> None:
        vocab_size = self._shared.model.vocab_size
        contents = await self._compute(lambda: contents_of(learner, self._assignment, vocab_size, result))
        self.lease = await self._policy.commit(self.lease, contents)
        self._shared.commits[self._assignment.key] += 1
        self._adapters[result.version] = sha256_hex(contents.files[TENSORS_FILE])
        await self._shared.tell(self._assignment, "VersionCommitted", f"version {result.version} of step {result.step}")

    async def _read(self, group: GroupReady) -> list[Trajectory]:
        """The group's trajectories; a turn that stays missing is lost. Raises TrajectoryInvalid."""
        context = self._shared.context
        expected = Expectation(self._spec.rollout.temperature, self._shared.model.vocab_size, self._adapters)
        since = context.now()
        while True:
            try:
                return await read_group(context.bus, context.blobs, group, expected)
            except Retryable as error:
                waited = context.now() - since
                if isinstance(error, TurnMissing) and waited >= self._shared.timing.missing_turn_s:
                    raise TrajectoryInvalid(f"{error}, {waited:.0f} s after its group was complete") from error
                await asyncio.sleep(self._shared.timing.retry_s)

    async def _forget_state(self) -> None:
        """Training states older than what is kept are of no use to anybody."""
        old = self.lease.record.version - self._spec.checkpoint.keep
        await self._patiently(lambda: self._policy.forget_state(old))

    def _busy_s(self) -> float:
        return self._shared.compute.busy_s_by_account.get(self._assignment.ref.uid, 0.0)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await self._shared.compute.run(work, self._assignment.ref.uid)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, self._assignment.key, self._shared.timing.retry_s)

"""The gradient of an agent's open step: cuts the trajectories of its groups into micro-batches, and runs a backward pass for each.

A step is `updatesPerStep` optimizer updates, each of the next groupsPerStep / updatesPerStep groups in the order of their positions,
repeated `epochs` times in the same order and with the same micro-batches. So an update does not wait for the step's later groups.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.messages.training_settings import TrainingSettings
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.trainer.batching import Row, pack, padded_tokens
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.trained_agent import TrainedAgent
from marlaas_worker.trainer.trajectories import Trajectory, held_out_apart
from marlaas_worker.trainer.weighing import Baselines, batches_of_group, rows_of_groups, weighing

T = TypeVar("T")


class DoesNotFit(Exception):
    """The device has no memory for a micro-batch. The learner has dropped the step's gradients so far.

    rows: the rows of the micro-batch.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = rows


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A micro-batch of the first epoch, and its tokens' logprobs [N] at the step's first parameters."""

    rows: Sequence[Row]
    proximal: npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class _OpenStep:
    """State of the step that is being accumulated, and of its optimizer update that is being accumulated (the *open* ones)."""

    held: list[list[Trajectory]] = field(default_factory=list)
    """Groups whose rewards are not compared yet."""
    pending: list[Row] = field(default_factory=list)
    """Rows that do not fill a micro-batch yet."""
    num_groups: int = 0
    """Number of groups of the open update so far."""
    done: list[_Done] = field(default_factory=list)
    """Micro-batches of the open update so far, if further epochs repeat them."""
    updates: list[tuple[int, list[_Done]]] = field(default_factory=list)
    """Number of groups and micro-batches of each earlier update of the first epoch; further epochs repeat them."""
    num_filtered: int = 0
    """Number of trajectories that `training.overlong.filter` leaves out."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of tokens, by the number of versions between sampling and training."""


class Accumulation:
    """Accumulates the gradient of an agent, one step after another, from groups that the caller adds in the order of their positions.

    The result does not depend on when the groups arrive.

    Attributes:
        baselines: running means of rewards; they have no values if rewards are compared within groups.
    """

    def __init__(self, agent: TrainedAgent) -> None:
        self.baselines = Baselines(agent.assignment.training.baseline)
        self._agent = agent
        self._pairs_per_token = agent.shared.model.pairs_per_token
        self._open = _OpenStep()
        self._set(agent.assignment.training)

    @property
    def num_groups(self) -> int:
        """Number of groups of the open update so far."""
        return self._open.num_groups

    @property
    def num_filtered(self) -> int:
        """Number of trajectories of the step that `training.overlong.filter` leaves out."""
        return self._open.num_filtered

    def _set(self, training: TrainingSettings) -> None:
        """Use the settings of a step."""
        self._training = training
        self._rule = ALGORITHMS[training.algorithm]
        self._kl = training.kl
        self._weighing = weighing(training, self._agent.assignment.document.spec.rollout.max_tokens)

    def _begin(self, learner: Learner, step: int) -> None:
        """Use the settings of this step, here and in the learner."""
        if (training := self._agent.assignment.training_at(step)) != self._training:
            self._set(training)
        learner.use(training)

    @property
    def _is_demonstrated(self) -> bool:
        return self._rule.surrogate == "likelihood"

    def rewind(self) -> None:
        """Drop the open step, which restarts at its first group."""
        self._open = _OpenStep()
        self.baselines.rewind()

    async def add(self, learner: Learner, trajectories: Sequence[Trajectory], step: int, version: int) -> None:
        """Add a group to the step, and run backward for every micro-batch that it fills.

        If the group is the first of an optimizer update, take the previous update first. Rows that do not fill a micro-batch wait for the
        next group of the update.
        If rewards are compared across the step, the group waits until the step is complete.

        Args:
            trajectories: the group's.
            step: the step's number.
            version: the policy version at which the step trains; the metric `token_staleness` counts from it.

        Raises:
            DoesNotFit: the step must begin again with a lower token budget.
        """
        members = list(trajectories)
        self._begin(learner, step)
        if self._is_demonstrated:
            members, held_out = held_out_apart(members, len(self._agent.assignment.document.spec.agents))
            await self._measure(learner, held_out)
        if self._kl.coefficient > 0 and self._kl.added_to == "reward":
            members = await self._less_kl(learner, members)
        self._open.num_filtered += sum(not self._weighing.trains(member) for member in members)
        for member in filter(self._weighing.trains, () if self._is_demonstrated else members):
            for sampled_by, length in member.trained_turns:
                self._open.staleness[version - sampled_by] += length
        self.baselines.add({} if self._is_demonstrated else self._weighing.rewards(members))
        self._open.held.append(members)
        if self._rule.over == "group":
            await self._learn(learner, step)

    async def complete(self, learner: Learner, step: int) -> None:
        """Run backward for the remaining rows, and take all updates of the step but the last. Raises DoesNotFit."""
        if self._open.held:
            await self._learn(learner, step)
        await self._end_minibatch(learner)
        for _ in range(1, self._training.epochs):
            for num_groups, batches in self._open.updates:
                await self._update(learner, step)
                self._open.num_groups = num_groups
                for batch in batches:
                    await self._backward(learner, batch.rows, batch.proximal)

    def finish_step(self, *, is_trained: bool = True) -> dict[str, float]:
        """Begin the next step; return metrics of the finished one.

        is_trained: whether the finished step makes a version; if not, the baselines do not change.
        """
        ended, self._open = self._open, _OpenStep()
        versions = sum(behind * number for behind, number in ended.staleness.items())
        if not is_trained:
            self.baselines.rewind()
        return {
            "overlong_filtered": float(ended.num_filtered),
            "token_staleness": versions / max(1, ended.staleness.total()),
            **self.baselines.finish_step(),
        }

    async def _less_kl(self, learner: Learner, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the group with each reward lowered by `kl.coefficient` times the trajectory's KL to the reference.

        The micro-batches in which the KL is computed hold this group only, so the sums do not depend on other groups.
        """
        batches = await asyncio.to_thread(batches_of_group, group, self._pairs_per_token, learner.token_budget)
        kl = [0.0] * len(group)
        for batch in batches:
            sums = await self._run(partial(learner.try_kl_by_trajectory, batch, len(group)), batch)
            if sums is None:
                raise DoesNotFit(batch)
            kl = [before + float(more) for before, more in zip(kl, sums, strict=True)]
        return [
            replace(member, reward=member.reward - self._kl.coefficient * cost)
            for member, cost in zip(group, kl, strict=True)
        ]

    async def _measure(self, learner: Learner, held_out: Sequence[Trajectory]) -> None:
        """Measure the loss of held-out demonstrations, in micro-batches of their own."""
        if not held_out:
            return
        batches = await asyncio.to_thread(batches_of_group, held_out, self._pairs_per_token, learner.token_budget)
        for batch in batches:
            if await self._run(partial(learner.try_measure_held_out, batch), batch) is None:
                raise DoesNotFit(batch)

    async def _learn(self, learner: Learner, step: int) -> None:
        """Run backward for every micro-batch that the held groups fill. Before the first group of an update, take the previous update."""
        now = self._open
        held, now.held = now.held, []
        # In a thread: packing long groups takes a while, and the event loop must keep leases alive.
        budget, values = learner.token_budget, dict(self.baselines.values)
        rows = await asyncio.to_thread(rows_of_groups, self._weighing, held, self._pairs_per_token, budget, values)
        for group in rows:
            if now.num_groups == self._training.groups_per_update:
                await self._end_minibatch(learner)
                await self._update(learner, step)
                now.num_groups = 0
            now.num_groups += 1
            full, now.pending = pack(now.pending, group, budget)
            for batch in full:
                await self._first_backward(learner, batch)

    async def _end_minibatch(self, learner: Learner) -> None:
        """Run backward for the remaining rows of the open update."""
        now = self._open
        if now.pending:
            await self._first_backward(learner, now.pending)
        now.updates.append((now.num_groups, now.done))
        now.pending, now.done = [], []

    async def _update(self, learner: Learner, step: int) -> None:
        await self._agent.compute(partial(learner.update, step, self.num_groups))

    async def _first_backward(self, learner: Learner, batch: Sequence[Row]) -> None:
        proximal = await self._backward(learner, batch)
        if self._training.epochs > 1:
            self._open.done.append(_Done(batch, proximal))

    async def _backward(
        self, learner: Learner, batch: Sequence[Row], proximal: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        found = await self._run(partial(learner.try_accumulate, batch, proximal), batch)
        if found is None:
            raise DoesNotFit(batch)
        return found

    async def _run(self, work: Callable[[], T], batch: Sequence[Row]) -> T:
        return await self._agent.compute(work, padded_tokens(batch))

"""One agent's learning: gradients summed at fixed parameters, AdamW's updates of a step, and its state. Runs on the compute thread.

Uses neither bus nor blobs. It changes only the agent's adapter parameters, their gradients and their moments. Computes with deterministic
kernels or with the fastest ones, as the job's `training.deterministic` says; jobs of both kinds share one trainer.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from marlaas_api.messages import Probe, UntrainedCause
from marlaas_api.messages.training_settings import TrainingSettings
from marlaas_worker.adapters import AdapterConfig, has_effect, read_adapter
from marlaas_worker.calibration import ids_of
from marlaas_worker.devices import OutOfMemory
from marlaas_worker.peft_config import other_base
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import CAPS, FLOOR, Bounds
from marlaas_worker.rl.losses import LossConfig, LossSums, TokenRecord, policy_loss
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.batching import MicroBatch, Row, collate
from marlaas_worker.trainer.calibration import measured
from marlaas_worker.trainer.compute import deterministic
from marlaas_worker.trainer.lora import AttachedAdapter, WeightsMismatch, initial_weights
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.optimizer import (
    MAX_SKIPPED,
    GradientInvalid,
    StateInvalid,
    TrainingState,
    adamw,
    learning_rate,
    update,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_OF_SAMPLES = LossSums().metrics().keys() - {"loss", "tokens", "sequences"}
"""Metrics that compare policies or describe sampled tokens, so demonstrations do not have them."""
_HELD_OUT = ("tokens", "loss", "best")
_MAX_LOSS = 700.0
"""Bound of a loss, in nats, before exp, so that the perplexity is finite."""


def loss_config(training: TrainingSettings, max_tokens: int) -> LossConfig:
    """Return the job's loss: the job's settings, with the algorithm's defaults. max_tokens: limit of a turn."""
    rule, clip, correction = ALGORITHMS[training.algorithm], training.clip, training.correction
    kind = correction.type or rule.correction
    in_loss = training.kl.added_to == "loss"
    return LossConfig(
        rule=rule,
        ratio=training.ratio,
        clip_low=rule.clip[0] if clip.low is None else clip.low,
        clip_high=rule.clip[1] if clip.high is None else clip.high,
        correction=Bounds(kind, correction.cap or CAPS.get(kind, math.inf), correction.floor or FLOOR),
        kl_coefficient=training.kl.coefficient if in_loss else 0.0,
        kl_estimator=training.kl.estimator or ("k3" if in_loss else "k1"),
        entropy_coefficient=training.entropy.coefficient,
        budget=max_tokens,
    )


def loss_factor(training: TrainingSettings, num_groups: int) -> float:
    """Return the factor of an update's loss: 1, or the share of its groups that train if `flatGroups` is `counted`.

    num_groups: groups of the agent that train in the update.
    """
    if training.flat_groups == "excluded":
        return 1.0
    return num_groups / max(training.groups_per_update, num_groups)


class Learner:
    """An agent's adapter on the shared base model, with its optimizer. Call `close` to detach the adapter.

    token_budget: most padded tokens of a micro-batch of several rows; lower than the job's `microbatchTokens` after a micro-batch did not
    fit the device. Set it only between steps, or after a `try_` method failed.
    """

    def __init__(self, model: BaseModel, assignment: Assignment) -> None:
        self._model = model
        self._assignment = assignment
        self._training = self._own = assignment.training
        self._set_loss()
        self._adapter = self._attach()
        self._reference: AttachedAdapter | None = None
        self._initial: dict[str, Tensor] = {}
        self._optimizer = adamw([self._adapter.flat], self._training.optimizer)
        self._sums = LossSums()
        """Sums of the micro-batches since the last update."""
        self._updated = LossSums()
        """Sums of the step's updates so far."""
        self._num_best = 0.0
        """Number of the step's demonstrated tokens that were the most probable ones when they were computed."""
        self._held_out = dict.fromkeys(_HELD_OUT, 0.0)
        """Sums over the step's held-out demonstrated tokens."""
        self._norms: list[float] = []
        """Norms of the gradients of the step's updates."""
        self._work: Counter[str] = Counter()
        """Numbers of micro-batches and tokens that the step has computed, by the name of the metric."""
        self._first: AttachedAdapter | None = None
        """Copy of the parameters at the step's beginning, if the step needs one."""
        self._has_moved = False
        self.token_budget = self._training.microbatch_tokens
        self._num_skipped = 0

    def _attach(self) -> AttachedAdapter:
        spec = self._assignment.agent.adapter
        return self._model.attach(spec.rank, spec.alpha, spec.targets)

    @property
    def config(self) -> AdapterConfig:
        """Rank, alpha and base model of the adapter."""
        return self._adapter.config

    def use(self, training: TrainingSettings) -> None:
        """Use the settings of a step (`Assignment.training_at`). Call it with other settings only between steps."""
        if training != self._training:
            self._training = training
            self._set_loss()

    def _set_loss(self) -> None:
        rollout = self._assignment.document.spec.rollout
        self._loss = loss_config(self._training, rollout.max_tokens)
        self._temperature = 1.0 if self._loss.is_likelihood else rollout.temperature

    @property
    def _is_before(self) -> bool:
        """Whether the settings in use are those of supervised fine-tuning (`initFrom.sft`), whose steps precede the agent's own algorithm."""
        return self._training.algorithm != self._own.algorithm

    def _rate(self, number: int) -> float:
        """Return the learning rate of a step; the schedule counts the steps after supervised fine-tuning."""
        sft = self._assignment.document.spec.sft_of(self._assignment.agent)
        before = 0 if sft is None or self._is_before else sft.steps
        return learning_rate(self._training.optimizer, number - before, self._training.steps - before)

    def _end_sft(self) -> None:
        """Make the result of supervised fine-tuning the KL reference, unless the job names another, and drop AdamW's moments."""
        self._optimizer.state.clear()
        kl = self._own.kl
        if kl.reference.path is None or not kl.coefficient:
            self._set_initial(self._adapter.tensors())

    def begin(self) -> tuple[str, ...]:
        """Load the weights of version 0 (an adapter without effect, or that of initFrom) and the fixed KL reference.

        Return a sentence for each given adapter that names another base model. Raises AdapterInvalid, WeightsMismatch.
        """
        remarks: list[str] = []
        agent, reference = self._assignment.agent, self._training.kl.reference.path
        self._adapter.load(initial_weights(self._adapter.parameters, self._assignment.document.seed, agent.name))
        given = None if agent.init_from is None else agent.init_from.path
        if given is not None:
            self._adapter.load(self._read("initFrom", given, remarks))
        if reference is not None and agent.trainable and self._training.kl.coefficient > 0:
            self._set_initial(self._read("kl.reference", reference, remarks))
        elif given is not None:
            self._set_initial(self._adapter.tensors())
        return tuple(remarks)

    def restore(self, weights: Mapping[str, Tensor], state: TrainingState) -> None:
        """Load a version's weights and training state, and drop the open step. Raises WeightsMismatch, StateInvalid."""
        self._drop_step()
        self._has_moved = False
        self._optimizer.state.clear()
        self._adapter.load(weights)
        self._set_initial(dict(state.initial))
        self.token_budget = state.token_budget or self._training.microbatch_tokens
        self._num_skipped = state.num_skipped
        if not state.num_updates:
            return
        self._optimizer.state[self._adapter.flat] = {
            "step": torch.tensor(float(state.num_updates), dtype=torch.float32),
            "exp_avg": self._flat(state.first_moments),
            "exp_avg_sq": self._flat(state.second_moments),
        }

    def accumulate(
        self, rows: Sequence[Row], proximal: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Add one micro-batch's unnormalised gradient.

        Return the logprobs of its generated tokens [N] under the parameters at the step's beginning, for the step's further epochs.

        Args:
            proximal: what an earlier call of the step returned for the same rows; None: this is the first call for them.

        Raises:
            OutOfMemory: the device has no memory for the micro-batch.
        """
        batch = collate(rows)
        with deterministic(self._training.is_deterministic):
            found = self._accumulate(batch, proximal)
        self._work["microbatches"] += 1
        self._work["computed_tokens"] += batch.num_padded_tokens
        self._work["segment_tokens"] += sum(row.num_segment_tokens for row in rows)
        return found

    def _accumulate(self, batch: MicroBatch, known: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
        reference = self._reference_logprobs(batch) if self._loss.kl_coefficient else None
        proximal = self._proximal_logprobs(batch, known)
        trainer, entropies = self._predict(batch)
        behaviour = trainer.detach() if self._loss.is_likelihood else torch.from_numpy(batch.behaviour).to(trainer)
        advantages = torch.from_numpy(batch.advantages).to(trainer)
        sequences = torch.from_numpy(batch.sequences).to(trainer.device)
        lengths = torch.from_numpy(batch.lengths).to(trainer.device)
        tokens = TokenRecord(trainer, behaviour, advantages, sequences, lengths, reference, proximal, entropies)
        loss, sums = policy_loss(tokens, self._loss)
        if sums.num_counted:
            self._adapter.collect_gradients()
            self._model.backward(loss, batch)
        self._sums += sums
        return tokens.fixed(self._loss).float().cpu().numpy()

    def _proximal_logprobs(self, batch: MicroBatch, known: npt.NDArray[np.float32] | None) -> Tensor | None:
        """Return the tokens' logprobs [N] at the step's first parameters; None if those are the present ones, or no ratio needs them."""
        if not self._has_moved or not self._loss.is_proximal:
            return None
        if known is not None:
            return torch.from_numpy(known).to(self._adapter.flat)
        with torch.no_grad():
            return self._model.logprobs(self._first, batch, self._temperature)

    def try_accumulate(
        self, rows: Sequence[Row], proximal: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32] | None:
        """Call `accumulate`; if the device has no memory for it, drop the whole step so far and return None."""
        return self._try(lambda: self.accumulate(rows, proximal))

    def try_measure_held_out(self, rows: Sequence[Row]) -> bool | None:
        """Add the loss of demonstrations that are not trained to the step's metrics, under the present parameters; return True.

        If the device has no memory for it, drop the whole step so far and return None.
        """
        return self._try(lambda: self._measure_held_out(rows))

    def _measure_held_out(self, rows: Sequence[Row]) -> bool:
        batch = collate(rows)
        with deterministic(self._training.is_deterministic), torch.no_grad():
            logprobs, best = self._model.logprobs_and_ranks(self._adapter, batch, self._temperature)
        sums = len(logprobs), -logprobs.double().sum().item(), best.sum().item()
        self._held_out = {name: self._held_out[name] + value for name, value in zip(_HELD_OUT, sums, strict=True)}
        return True

    def kl_by_trajectory(self, rows: Sequence[Row], num_trajectories: int) -> npt.NDArray[np.float64]:
        """Return the sum of log(mu / reference) over each trajectory's tokens in these rows, [num_trajectories].

        It is the KL in the reward. mu is the policy that the engine recorded: a reward belongs to a sample, so its KL is
        that of the policy that sampled, whatever version trains on it. The sums are added to the metric `kl`. Raises
        OutOfMemory.
        """
        batch = collate(rows)
        with deterministic(self._training.is_deterministic):
            reference = self._reference_logprobs(batch).double().cpu().numpy()
        gaps = batch.behaviour.astype(np.float64) - reference
        self._sums += LossSums(reference_kl=float(gaps.sum()))
        sums = np.zeros(num_trajectories)
        np.add.at(sums, batch.trajectories, gaps)
        return sums

    def try_kl_by_trajectory(self, rows: Sequence[Row], num_trajectories: int) -> npt.NDArray[np.float64] | None:
        """Call `kl_by_trajectory`; if the device has no memory for it, drop the whole step so far and return None."""
        return self._try(lambda: self.kl_by_trajectory(rows, num_trajectories))

    def refer_to(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights as the KL reference. Raises WeightsMismatch."""
        if self._reference is None:
            self._reference = self._attach()
        self._reference.load(weights)

    @property
    def has_moved(self) -> bool:
        """Whether the open step has taken an update, so that a restart of the step needs `restore`, also after a `try_` method failed."""
        return self._has_moved

    def why_untrained(self, num_filtered: int) -> UntrainedCause | None:
        """Return why no token of the step counts; None if one does. num_filtered: trajectories that `training.overlong.filter` left out."""
        sums = self._updated + self._sums
        if sums.denominator:
            return None
        if sums.num_tokens:
            return UntrainedCause.MASKED
        return UntrainedCause.FILTERED if num_filtered else UntrainedCause.EMPTY

    def update(self, number: int, num_groups: int) -> None:
        """Take one optimizer update of the step of this number, with the gradient since the last update.

        If no generated token counts, or the gradient is not finite, weights and moments are unchanged.

        Args:
            number: number of the step; all updates of a step have one learning rate.
            num_groups: groups of the agent that train in the update.

        Raises:
            GradientInvalid: the gradient is not finite in MAX_SKIPPED consecutive updates.
        """
        sums, optimizer = self._sums, self._training.optimizer
        factor = loss_factor(self._training, num_groups)
        self._updated += replace(sums, loss=sums.loss * factor)
        self._sums = LossSums()
        if not sums.denominator:
            return
        if self._loss.is_proximal and self._training.has_several_updates and not self._has_moved:
            self._copy_first()
        self._adapter.collect_gradients()
        rate = self._rate(number)
        views = self._adapter.parameters.values()
        with deterministic(self._training.is_deterministic):
            norm = update(self._optimizer, sums.denominator / factor, rate, optimizer.max_grad_norm, views)
        self._adapter.drop_gradients()
        self._count_skipped(number, norm)
        self._norms.append(norm)
        self._has_moved = True

    def step(self, number: int, num_groups: int) -> dict[str, float]:
        """Take the last update of a step, and return the step's metrics without those that are not finite.

        Metrics besides those of the loss:

        - updates: number of updates. skipped_update: number of those whose gradient was not finite.
        - grad_norm: mean norm of the updates' finite gradients. learning_rate: of the step.
        - computed_tokens: tokens computed by the model, padding included.
        - microbatches: number of micro-batches. segment_tokens: total length of the segments; a shared token counts once per segment.
        - microbatch_tokens: the step's token budget.

        Of demonstrations, the metrics of the loss are loss, tokens and sequences, besides perplexity, which is exp(loss), and
        token_accuracy: share of the tokens that were the most probable ones, under the same parameters as the loss. If held-out
        demonstrations were measured, held_out_loss and held_out_token_accuracy, over all of their tokens.

        Args and Raises as `update`.
        """
        self.update(number, num_groups)
        training = self._training
        norms = [norm for norm in self._norms if math.isfinite(norm)]
        metrics = self._updated.metrics() | {name: float(value) for name, value in self._work.items()}
        for name in ("tokens", "sequences"):
            metrics[name] /= training.epochs
        if training.kl.added_to == "reward":  # summed once, before the first epoch
            metrics["kl"] *= training.epochs
        if not training.has_several_updates:
            del metrics["update_kl"]
        if training.distillation is None:
            del metrics["teacher_kl"]
        if self._loss.is_likelihood:
            metrics = {name: value for name, value in metrics.items() if name not in _OF_SAMPLES}
            metrics["token_accuracy"] = self._num_best / max(1, self._updated.num_tokens)
            if num_held_out := self._held_out["tokens"]:
                metrics["held_out_loss"] = self._held_out["loss"] / num_held_out
                metrics["held_out_token_accuracy"] = self._held_out["best"] / num_held_out
            metrics["perplexity"] = math.exp(min(metrics["loss"], _MAX_LOSS))
        metrics["learning_rate"] = self._rate(number)
        if norms or not self._norms:
            metrics["grad_norm"] = math.fsum(norms) / max(1, len(norms))
        metrics["microbatch_tokens"] = float(self.token_budget)
        metrics["updates"] = float(len(self._norms))
        metrics["skipped_update"] = float(len(self._norms) - len(norms))
        self._drop_step()
        self._has_moved = False
        if self._is_before and number == training.steps - 1:
            self._end_sft()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter's weights by PEFT's names, in host memory."""
        return self._adapter.tensors()

    def state(self, step: int, consumed: tuple[str, ...]) -> TrainingState:
        """Return the training state that belongs to `weights`.

        Args:
            step: the step that produced these weights.
            consumed: names of that step's groups, by position.
        """
        held = self._optimizer.state[self._adapter.flat]
        return TrainingState(
            step=step,
            consumed=consumed,
            num_updates=int(held["step"]) if held else 0,
            first_moments=self._adapter.parts(held["exp_avg"].to("cpu", copy=True)) if held else {},
            second_moments=self._adapter.parts(held["exp_avg_sq"].to("cpu", copy=True)) if held else {},
            initial=self._initial,
            token_budget=self.token_budget if self.token_budget < self._training.microbatch_tokens else 0,
            num_skipped=self._num_skipped,
        )

    def measure(self, probes: Sequence[Probe]) -> tuple[tuple[Probe, ...], float]:
        """Return the probes' logprobs under the current weights, and the noise of the model's dtype; see `calibration.measured`."""
        with deterministic(self._training.is_deterministic):
            return measured(self._model, self._adapter, [ids.tolist() for ids in ids_of(probes)])

    def close(self) -> None:
        """Detach the adapter, the KL reference and the step's first parameters from the base model."""
        for adapter in (self._adapter, self._reference, self._first):
            if adapter is not None:
                self._model.detach(adapter)

    def _flat(self, moments: Mapping[str, Tensor]) -> Tensor:
        """Return moments by name as one buffer on the device. Raises StateInvalid if one is missing or has another shape."""
        for name, parameter in self._adapter.parameters.items():
            if name not in moments or moments[name].shape != parameter.shape:
                raise StateInvalid(f"the training state lacks the moments of {name}")
        parts = [moments[name].reshape(-1) for name in self._adapter.parameters]
        return torch.cat(parts).to(self._adapter.flat.device, torch.float32)

    def _read(self, field: str, path: str, remarks: list[str]) -> dict[str, Tensor]:
        tensors, config = read_adapter(Path(path))
        if (config.rank, config.alpha) != (self.config.rank, self.config.alpha):
            raise WeightsMismatch(
                f"{field} {path} has rank {config.rank} and alpha {config.alpha}; "
                f"the agent's adapter has {self.config.rank} and {self.config.alpha}"
            )
        remark = other_base(config.base_model, config.revision, *self._model.source)
        if remark is not None:
            remarks.append(f"{field} {path}: {remark}")
        return {name: tensor.float() for name, tensor in tensors.items()}

    def _set_initial(self, weights: dict[str, Tensor]) -> None:
        """Keep these weights as the fixed KL reference, which becomes part of every training state.

        Weights without effect are not kept: the reference is then the base model without adapter.
        """
        if weights and has_effect(weights):
            self._initial = weights
            if self._own.kl.coefficient > 0 and self._own.kl.reference.versions_behind is None:
                self.refer_to(weights)

    def _predict(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Return the logprobs of the batch's tokens, and their entropies if the loss has an entropy term."""
        if self._loss.entropy_coefficient:
            return self._model.logprobs_and_entropies(self._adapter, batch, self._temperature)
        if self._loss.is_likelihood:
            logprobs, best = self._model.logprobs_and_ranks(self._adapter, batch, self._temperature)
            self._num_best += best.sum().item()
            return logprobs, None
        return self._model.logprobs(self._adapter, batch, self._temperature), None

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self._model.logprobs(self._reference, batch, self._temperature)

    def _try(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except OutOfMemory as error:
            text = str(error)  # a log record with the error object would keep the failed pass and its memory alive
            log.warning("%s: %s", self._assignment.policy_key, text)
        self._drop_step()  # after the except clause, whose error object keeps the failed pass alive
        self._model.free_memory()
        return None

    def _drop_step(self) -> None:
        """Drop the gradients and metrics of the open step."""
        self._adapter.drop_gradients()
        self._sums = LossSums()
        self._updated = LossSums()
        self._num_best = 0.0
        self._held_out = dict.fromkeys(_HELD_OUT, 0.0)
        self._norms = []
        self._work = Counter()

    def _copy_first(self) -> None:
        """Copy the parameters of the step's beginning, under which the proximal logprobs of later micro-batches are computed."""
        if self._first is None:
            self._first = self._attach()
        with torch.no_grad():
            self._first.flat.copy_(self._adapter.flat)

    def _count_skipped(self, number: int, norm: float) -> None:
        self._num_skipped = 0 if math.isfinite(norm) else self._num_skipped + 1
        if self._num_skipped >= MAX_SKIPPED:
            raise GradientInvalid(
                f"the gradient of {self._assignment.policy_key} is not finite (its norm is {norm}) in {self._num_skipped} updates in a row, "
                f"the last of them of step {number}: training diverges; create a new job with a lower training.optimizer.learningRate or a longer warmupSteps"
            )

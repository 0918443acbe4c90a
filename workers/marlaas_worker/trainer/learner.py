"""One agent's learning: gradients summed at fixed parameters, one AdamW step, its state out and in. Runs on the compute thread.

Knows neither bus nor blobs. Everything that it changes is its own: adapter parameters, their gradients, their moments.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from marlaas_api.errors import Permanent
from marlaas_api.kinds import OptimizerSpec, TrainingSpec
from marlaas_api.messages import Probe
from marlaas_worker.adapters import AdapterConfig, has_effect, read_adapter
from marlaas_worker.calibration import ids_of
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import CAPS, FLOOR, Bounds
from marlaas_worker.rl.losses import LossConfig, LossSums, TokenRecord, policy_loss
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.model import AttachedAdapter, BaseModel, WeightsMismatch, initial_weights
from marlaas_worker.trainer.probes import measured
from marlaas_worker.trainer.rows import Row
from marlaas_worker.trainer.state import StateInvalid, TrainingState


class GradientInvalid(Permanent):
    """A step's gradient is not finite; its version would be ruined."""


def loss_config(training: TrainingSpec, max_tokens: int) -> LossConfig:
    """The job's loss: what it says, and else what its algorithm says. max_tokens: of a turn."""
    rule, clip, correction = ALGORITHMS[training.algorithm], training.clip, training.correction
    kind = correction.type or rule.correction
    return LossConfig(
        rule=rule,
        clip_low=rule.clip[0] if clip.low is None else clip.low,
        clip_high=rule.clip[1] if clip.high is None else clip.high,
        correction=Bounds(kind, correction.cap or CAPS.get(kind, math.inf), correction.floor or FLOOR),
        kl_coefficient=training.kl.coefficient,
        kl_estimator=training.kl.estimator,
        budget=max_tokens,
    )


def learning_rate(optimizer: OptimizerSpec, version: int) -> float:
    """Rate of the step that trains on `version`: linear warm-up to the peak, then constant."""
    return optimizer.learning_rate * min(1.0, (version + 1) / max(1, optimizer.warmup_steps))


class Learner:
    """An agent's adapter on the shared base model, with its optimizer. Close it, or the adapter stays."""

    def __init__(self, model: BaseModel, assignment: Assignment) -> None:
        self._model = model
        self._assignment = assignment
        self._training = assignment.document.spec.training
        self._temperature = assignment.document.spec.rollout.temperature
        self._loss = loss_config(self._training, assignment.document.spec.rollout.max_tokens)
        spec = assignment.agent.adapter
        self._adapter = model.attach(spec.rank, spec.alpha, spec.targets)
        self._reference: AttachedAdapter | None = None
        self._initial: dict[str, Tensor] = {}
        self._optimizer = _adamw(self._adapter, self._training.optimizer)
        self._sums, self._work = LossSums(), Counter[str]()

    @property
    def config(self) -> AdapterConfig:
        """Rank and alpha."""
        return self._adapter.config

    def begin(self) -> None:
        """Take version 0's weights: the zero adapter, or what initFrom names. Raises AdapterInvalid, WeightsMismatch."""
        agent = self._assignment.agent
        self._adapter.load(initial_weights(self._adapter.parameters, self._assignment.document.seed, agent.name))
        if agent.init_from is not None:
            tensors, config = read_adapter(Path(agent.init_from.path))
            if (config.rank, config.alpha) != (self.config.rank, self.config.alpha):
                raise WeightsMismatch(
                    f"initFrom {agent.init_from.path} has rank {config.rank} and alpha {config.alpha}; "
                    f"the agent's adapter has {self.config.rank} and {self.config.alpha}"
                )
            self._adapter.load(tensors)
            self._keep_initial(self._adapter.tensors())

    def restore(self, weights: Mapping[str, Tensor], state: TrainingState) -> None:
        """Go on from a version's weights and state. Raises WeightsMismatch, StateInvalid."""
        self._adapter.load(weights)
        self._keep_initial(dict(state.initial))
        if not state.num_updates:
            return
        for name, parameter in self._adapter.parameters.items():
            if name not in state.first_moments or name not in state.second_moments:
                raise StateInvalid(f"a training state lacks the moments of {name}")
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(state.num_updates)),
                "exp_avg": state.first_moments[name].to(parameter.device, copy=True),
                "exp_avg_sq": state.second_moments[name].to(parameter.device, copy=True),
            }

    def accumulate(self, rows: Sequence[Row]) -> None:
        """Add one micro-batch's gradient, unnormalised. Raises OutOfMemory."""
        batch = collate(rows)
        reference = self._reference_logprobs(batch)
        trainer = self._model.logprobs(self._adapter, batch, self._temperature)
        behaviour = torch.from_numpy(batch.behaviour).to(trainer)
        advantages = torch.from_numpy(batch.advantages).to(trainer)
        sequences = torch.from_numpy(batch.sequences).to(trainer.device)
        loss, sums = policy_loss(TokenRecord(trainer, behaviour, advantages, sequences, reference), self._loss)
        if sums.num_counted:
            self._model.backward(loss, batch)
        self._sums += sums
        self._work["microbatches"] += 1
        self._work["computed_tokens"] += batch.num_padded_tokens
        self._work["segment_tokens"] += sum(row.num_segment_tokens for row in rows)

    def step(self, version: int) -> dict[str, float]:
        """Take the optimizer step that `version` is trained with, and return the step's metrics.

        Besides those of the loss: computed_tokens went through the model, padding included, for segment_tokens of all segments; less where
        beginnings are shared.

        Without a single generated token that counts the weights stay as they are. Raises GradientInvalid.
        """
        sums, metrics = self._sums, self._sums.metrics()
        metrics |= {name: float(value) for name, value in self._work.items()}
        metrics |= {"learning_rate": learning_rate(self._training.optimizer, version), "grad_norm": 0.0}
        if sums.denominator:
            metrics["grad_norm"] = self._update(sums.denominator, metrics["learning_rate"])
        self._optimizer.zero_grad(set_to_none=True)
        self._sums, self._work = LossSums(), Counter[str]()
        return metrics

    def weights(self) -> dict[str, Tensor]:
        """The adapter's weights by PEFT's names, in host memory."""
        return self._adapter.tensors()

    def state(self, step: int, consumed: tuple[str, ...]) -> TrainingState:
        """The state that goes with `weights`, at this place in the data."""
        held = {
            name: self._optimizer.state[p] for name, p in self._adapter.parameters.items() if self._optimizer.state[p]
        }
        updates = {int(value["step"]) for value in held.values()}
        return TrainingState(
            step=step,
            consumed=consumed,
            num_updates=max(updates, default=0),
            first_moments={name: value["exp_avg"] for name, value in held.items()},
            second_moments={name: value["exp_avg_sq"] for name, value in held.items()},
            initial=self._initial,
        )

    def measure(self, probes: Sequence[Probe]) -> tuple[tuple[Probe, ...], float]:
        """The probes with their logprobs under the present weights, and the noise of the model's dtype under them; see `probes.measured`."""
        return measured(self._model, self._adapter, [ids.tolist() for ids in ids_of(probes)])

    def close(self) -> None:
        """Take the adapter off the base model."""
        for adapter in (self._adapter, self._reference):
            if adapter is not None:
                self._model.detach(adapter)

    def _keep_initial(self, weights: dict[str, Tensor]) -> None:
        if weights and has_effect(weights):
            self._initial = weights
            if self._loss.kl_coefficient > 0:
                spec = self._assignment.agent.adapter
                self._reference = self._model.attach(spec.rank, spec.alpha, spec.targets)
                self._reference.load(weights)

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self._loss.kl_coefficient == 0:
            return None
        with torch.no_grad():
            return self._model.logprobs(self._reference, batch, self._temperature)

    def _update(self, denominator: int, rate: float) -> float:
        parameters = list(self._adapter.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:  # a layer that no token went through
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(denominator)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._training.optimizer.max_grad_norm))
        if not norm < float("inf"):
            raise GradientInvalid(f"the gradient of {self._assignment.key} has norm {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return norm


def _adamw(adapter: AttachedAdapter, spec: OptimizerSpec) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        adapter.parameters.values(), lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
    )

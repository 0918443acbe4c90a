"""Records for the tests of the loss."""

import math
from dataclasses import replace
from typing import Any

import torch
from tests.rl.papers import BUDGET

from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.rl.losses import LossConfig, TokenRecord, policy_loss

NONE = Bounds("none")


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def config_of(algorithm, correction=NONE, **changes: Any):
    """The algorithm with its paper's bounds; the papers' off-policy form unless said otherwise."""
    rule = ALGORITHMS[algorithm]
    settings = {"ratio": "behaviour", "clip_low": rule.clip[0], "clip_high": rule.clip[1], "budget": BUDGET} | changes
    return LossConfig(rule=rule, correction=correction, **settings)


def record_of(sequences, gaps=None):
    """Sequences of (advantage, ratios pi / mu of the tokens), a trajectory each. gaps: log ref / pi of all tokens."""
    numbers = torch.tensor([number for number, (_, ratios) in enumerate(sequences) for _ in ratios])
    advantages = [advantage for advantage, ratios in sequences for _ in ratios]
    behaviour = torch.linspace(-3.0, -0.5, len(numbers), dtype=torch.float64)
    logs = [math.log(ratio) for _, ratios in sequences for ratio in ratios]
    trainer = (behaviour + f64(logs)).requires_grad_()
    reference = None if gaps is None else (trainer + f64(gaps)).detach()
    return TokenRecord(trainer, behaviour, f64(advantages), numbers, lengths_of(numbers), reference)


def moved(record, ratios):
    """The record with a proximal policy of its own: ratios pi_prox / mu of the tokens."""
    return replace(record, proximal=record.behaviour + f64([math.log(ratio) for ratio in ratios]))


def random_record(num_sequences=9, seed=0, spread=0.4, reference=False):
    """Sequences of 1 to 7 tokens, a trajectory each."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (num_sequences,), generator=draw)
    numbers = torch.repeat_interleave(torch.arange(num_sequences), lengths)
    size = len(numbers)
    behaviour = -3.0 * torch.rand(size, generator=draw, dtype=torch.float64) - 0.1
    trainer = (behaviour + spread * torch.randn(size, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(num_sequences, generator=draw, dtype=torch.float64)[numbers]
    gaps = 0.7 * torch.randn(size, generator=draw, dtype=torch.float64)
    made = TokenRecord(trainer, behaviour, advantages, numbers, lengths[numbers])
    return replace(made, reference=(trainer + gaps).detach()) if reference else made


def lengths_of(sequences):
    return torch.bincount(sequences)[sequences]


def part_of(record, places):
    """Some sequences of a record, numbered anew from 0; places: bool [T]."""
    left = record.where(places)
    _, numbers = torch.unique(left.sequences, return_inverse=True)
    return replace(left, sequences=numbers)


def normalised(record, config):
    """The loss of a step that consists of this record, and its gradient by the trainer's logprobs."""
    loss, sums = policy_loss(record, config)
    (gradient,) = torch.autograd.grad(loss, record.trainer)
    return loss.item() / sums.denominator, gradient / sums.denominator

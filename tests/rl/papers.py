"""The algorithms once more, as their papers write them: reply by reply and token by token, to be maximised, with nothing of ours in between.

A batch is a list of replies: (logprobs under the trained policy, with gradient; logprobs under the behaviour policy; logprobs under the proximal policy;
advantage). `FORMS` gives for each form of the ratio the objectives by name. CAP is the truncation of importance weights, in the proximal form.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import Bounds
from marlaas_worker.rl.losses import LossConfig, TokenRecord, policy_loss

Batch = Sequence[tuple[Sequence[Tensor], Sequence[float], Sequence[float], float]]
BUDGET = 256
"""rollout.maxTokens, unless a job says otherwise."""
CAP = 2.0


def clipped(ratio, advantage, low, high):
    """PPO's surrogate: the worse of the ratio and the clipped ratio."""
    bound = 1 + high if advantage >= 0 else 1 - low
    held = ratio > bound if advantage >= 0 else ratio < bound
    return torch.tensor(bound * advantage, dtype=ratio.dtype) if held else ratio * advantage


def tokens_of(batch, proximal, low=0.2, high=0.2):
    """The clipped surrogate of each token: of pi/mu, or of pi/pi_prox times the truncated pi_prox/mu."""
    made = []
    for pi, mu, prox, advantage in batch:
        of_reply = []
        for p, m, x in zip(pi, mu, prox, strict=True):
            weight = min(math.exp(x - m), CAP) if proximal else 1.0
            of_reply.append(weight * clipped((p - (x if proximal else m)).exp(), advantage, low, high))
        made.append(of_reply)
    return made


def grpo(batch, proximal):
    return torch.stack([torch.stack(reply).mean() for reply in tokens_of(batch, proximal)]).mean()


def dr_grpo(batch, proximal):
    return torch.stack([torch.stack(reply).sum() for reply in tokens_of(batch, proximal)]).mean() / BUDGET


def dapo(batch, proximal):
    return torch.stack([token for reply in tokens_of(batch, proximal, high=0.28) for token in reply]).mean()


def gspo(batch, proximal):
    replies = []
    for pi, mu, prox, advantage in batch:
        likelihood = torch.stack(list(pi)).sum().exp()
        before, between = (torch.tensor(sum(part), dtype=torch.float64).exp() for part in (mu, prox))
        ratio = (likelihood / (between if proximal else before)) ** (1 / len(pi))
        weight = min(float(between / before) ** (1 / len(pi)), CAP) if proximal else 1.0
        replies.append(weight * clipped(ratio, advantage, 3e-4, 4e-4))
    return torch.stack(replies).mean()


def rloo(batch, proximal):
    total = torch.zeros((), dtype=torch.float64)
    for pi, mu, prox, advantage in batch:
        for p, m, x in zip(pi, mu, prox, strict=True):
            off = min(math.exp(x - m), CAP) * (p.detach() - x).exp() if proximal else (p.detach() - m).exp()
            total = total + off * p * advantage
    return total / len(batch)


def cispo(batch, proximal):
    """Its weight is that against the policy that sampled, whatever the form."""
    tokens = [(p, m, advantage) for pi, mu, _, advantage in batch for p, m in zip(pi, mu, strict=True)]
    return torch.stack([(p.detach() - m).exp().clamp(max=5.0) * advantage * p for p, m, advantage in tokens]).mean()


def sft(batch, proximal):
    return torch.stack([p * advantage for pi, _, _, advantage in batch for p in pi]).mean()


def distill(batch, proximal):
    """A reply's number here is log(teacher / mu) of each of its tokens; they are graded against the policy before the update."""
    made = []
    for pi, mu, prox, number in batch:
        before = list(zip(prox, mu, strict=True)) if proximal else [(p.item(), m) for p, m in zip(pi, mu, strict=True)]
        graded = [((p,), (m,), (x,), m + number - x) for p, (x, m) in zip(pi, before, strict=True)]
        made += [token for reply in tokens_of(graded, proximal) for token in reply]
    return torch.stack(made).mean()


_OF_BOTH: Mapping[str, Callable[[Batch, bool], Tensor]] = {
    **{objective.__name__: objective for objective in (grpo, dapo, gspo, rloo, cispo, sft, distill)},
    **{"dr-grpo": dr_grpo, "reinforce++": grpo},  # the advantages of reinforce++ differ, which is not seen here
}
FORMS: Mapping[str, Mapping[str, Callable[[Batch], Tensor]]] = {
    "behaviour": {name: partial(objective, proximal=False) for name, objective in _OF_BOTH.items()},
    "proximal": {name: partial(objective, proximal=True) for name, objective in _OF_BOTH.items()},
}


NONE = Bounds("none")


def arithmetic(text):
    """A number that is written as arithmetic, as in the tables."""
    return float(eval(str(text), {"log": math.log}))


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

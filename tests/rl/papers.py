"""The algorithms once more, as their papers write them: sequence by sequence and token by token, to be maximised, with nothing of ours in between.

A batch is a list of (logprobs under the trained policy, with gradient; logprobs under the behaviour policy; advantage), one for each sequence.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Batch = Sequence[tuple[Sequence[Tensor], Sequence[float], float]]
BUDGET = 256
"""rollout.maxTokens, unless a job says otherwise."""


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO's surrogate: the worse of the ratio and the clipped ratio."""
    bound = 1 + high if advantage >= 0 else 1 - low
    held = ratio > bound if advantage >= 0 else ratio < bound
    return torch.tensor(bound * advantage, dtype=ratio.dtype) if held else ratio * advantage


def grpo(batch: Batch) -> Tensor:
    replies = [
        sum(clipped((p - m).exp(), advantage, 0.2, 0.2) for p, m in zip(pi, mu, strict=True)) / len(pi)
        for pi, mu, advantage in batch
    ]
    return torch.stack(replies).mean()  # type: ignore[arg-type]


def dr_grpo(batch: Batch) -> Tensor:
    total = sum(
        clipped((p - m).exp(), advantage, 0.2, 0.2) for pi, mu, advantage in batch for p, m in zip(pi, mu, strict=True)
    )
    return torch.as_tensor(total) / (BUDGET * len(batch))


def dapo(batch: Batch) -> Tensor:
    tokens = [
        clipped((p - m).exp(), advantage, 0.2, 0.28) for pi, mu, advantage in batch for p, m in zip(pi, mu, strict=True)
    ]
    return torch.stack(tokens).mean()


def gspo(batch: Batch) -> Tensor:
    replies = []
    for pi, mu, advantage in batch:
        likelihood, before = torch.stack(list(pi)).sum().exp(), torch.tensor(sum(mu), dtype=torch.float64).exp()
        replies.append(clipped((likelihood / before) ** (1 / len(pi)), advantage, 3e-4, 4e-4))
    return torch.stack(replies).mean()


def rloo(batch: Batch) -> Tensor:
    total = sum(
        (p.detach() - m).exp() * p * advantage for pi, mu, advantage in batch for p, m in zip(pi, mu, strict=True)
    )
    return torch.as_tensor(total) / len(batch)


def cispo(batch: Batch) -> Tensor:
    tokens = [
        min((p.detach() - m).exp(), torch.tensor(5.0, dtype=p.dtype)) * advantage * p
        for pi, mu, advantage in batch
        for p, m in zip(pi, mu, strict=True)
    ]
    return torch.stack(tokens).mean()


OBJECTIVES: Mapping[str, Callable[[Batch], Tensor]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "rloo": rloo,
    "reinforce++": grpo,  # its advantages differ, which is not seen here
    "cispo": cispo,
}

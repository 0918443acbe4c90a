"""Probes: short token sequences whose logprobs show that an engine computes the same as the trainer.

The base model generates them. Ids drawn from the whole vocabulary would be so improbable that rounding moves their
logprobs several times more, while another adapter moves them no further (bench/proof.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from marlaas_api.messages import Probe
from marlaas_api.names import derive_seed
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.calibration import NUM_PROBES, NUM_TOKENS
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.model import AttachedAdapter, BaseModel
from marlaas_worker.trainer.rows import Segment, chain

_SEED = 2026


def write_probes(model: BaseModel) -> Tensor:
    """Return ids [NUM_PROBES, NUM_TOKENS] sampled from the base model at temperature 1, the same at every call.

    Each row starts with its own first token, derived from a fixed seed.
    """
    first = [derive_seed(_SEED, "probe", number) % model.vocab_size for number in range(NUM_PROBES)]
    return model.write(torch.tensor(first)[:, None], NUM_TOKENS, torch.Generator().manual_seed(_SEED))


def batch_of(probes: Sequence[Sequence[int]]) -> MicroBatch:
    """Return the probes as one micro-batch in which every token but the first is predicted."""
    rows = []
    for ids in probes:
        predicted = np.arange(len(ids)) > 0
        rows.append(chain(Segment(np.array(ids, np.int32), predicted, np.zeros(len(ids), np.float32), 0, 0.0)))
    return collate(rows)


def measured(
    model: BaseModel, adapter: AttachedAdapter | None, probes: Sequence[Sequence[int]]
) -> tuple[tuple[Probe, ...], float]:
    """Return the probes with their float32 logprobs under an adapter (None: the base model), and the noise of the model's dtype.

    noise: mean |difference| between the logprobs in float32 and in the model's dtype; 0 for a float32 model.
    """
    batch, noise = batch_of(probes), 0.0
    with torch.no_grad():
        logprobs = model.logprobs(adapter, batch, 1.0).float()
    if model.dtype != torch.float32:
        precise = model.precise_logprobs(adapter, batch)
        noise, logprobs = (precise - logprobs).abs().mean().item(), precise
    parts = torch.split(logprobs.cpu(), [len(ids) - 1 for ids in probes])
    packed = (pack_logprobs(part.tolist()) for part in parts)
    return tuple(Probe(ids=pack_ids(ids), logprobs=one) for ids, one in zip(probes, packed, strict=True)), noise

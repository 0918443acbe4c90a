"""Short token sequences by whose logprobs an engine shows that it computes what the trainer computes.

They are text that the base model itself writes. Ids drawn over the whole vocabulary are so improbable that rounding moves their logprobs
by several times more, while another adapter moves them no further (bench/proof.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from marlaas_api.arrays import pack_ids, pack_logprobs
from marlaas_api.messages import Probe
from marlaas_api.names import derive_seed
from marlaas_worker.calibration import NUM_PROBES, NUM_TOKENS
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.model import AttachedAdapter, BaseModel
from marlaas_worker.trainer.rows import Segment, chain

_SEED = 2026


def write_probes(model: BaseModel) -> Tensor:
    """Ids [NUM_PROBES, NUM_TOKENS] drawn from the base model at temperature 1, each row after a first token of its own; the same every time."""
    first = [derive_seed(_SEED, "probe", number) % model.vocab_size for number in range(NUM_PROBES)]
    return model.write(torch.tensor(first)[:, None], NUM_TOKENS, torch.Generator().manual_seed(_SEED))


def batch_of(probes: Sequence[Sequence[int]]) -> MicroBatch:
    """The probes as one micro-batch in which every token but the first counts."""
    rows = []
    for ids in probes:
        predicted = np.arange(len(ids)) > 0
        rows.append(chain(Segment(np.array(ids, np.int32), predicted, np.zeros(len(ids), np.float32), 0, 0.0)))
    return collate(rows)


def measured(
    model: BaseModel, adapter: AttachedAdapter | None, probes: Sequence[Sequence[int]]
) -> tuple[tuple[Probe, ...], float]:
    """The probes with their logprobs under an adapter, or under the bare base model, in float32; and the noise of the model's own dtype.

    noise: mean |difference| of the logprobs in float32 and in the model's dtype; 0 for a float32 model.
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

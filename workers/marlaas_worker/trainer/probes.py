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


def measured(model: BaseModel, adapter: AttachedAdapter | None, probes: Sequence[Sequence[int]]) -> tuple[Probe, ...]:
    """The probes with their logprobs under an adapter, or under the bare base model."""
    with torch.no_grad():
        logprobs = model.logprobs(adapter, batch_of(probes), 1.0).float().cpu()
    parts = torch.split(logprobs, [len(ids) - 1 for ids in probes])
    return tuple(
        Probe(ids=pack_ids(ids), logprobs=pack_logprobs(part.tolist())) for ids, part in zip(probes, parts, strict=True)
    )

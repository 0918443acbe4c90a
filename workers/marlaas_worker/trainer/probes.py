"""Short token sequences by whose logprobs an engine shows that it computes what the trainer computes."""

import numpy as np

from marlaas_api.arrays import pack_ids, pack_logprobs
from marlaas_api.messages import Probe
from marlaas_api.names import derive_seed
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.rows import Segment

NUM_PROBES = 4
NUM_TOKENS = 24


def probe_segments(seed: int, agent: str, vocab_size: int) -> list[Segment]:
    """The agent's probes, the same at every version: ids drawn over the whole vocabulary, all but the first one predicted."""
    segments = []
    for number in range(NUM_PROBES):
        ids = [derive_seed(seed, agent, "probe", number, place) % vocab_size for place in range(NUM_TOKENS)]
        predicted = np.arange(NUM_TOKENS) > 0
        segments.append(Segment(np.array(ids, np.int32), predicted, np.zeros(NUM_TOKENS, np.float32), 0, 0.0))
    return segments


def probe(learner: Learner, seed: int, agent: str, vocab_size: int) -> tuple[Probe, ...]:
    """Measure the agent's probes under the learner's present weights."""
    segments = probe_segments(seed, agent, vocab_size)
    rows = learner.logprobs(segments).view(NUM_PROBES, NUM_TOKENS - 1)
    return tuple(
        Probe(ids=pack_ids(segment.ids.tolist()), logprobs=pack_logprobs(row.tolist()))
        for segment, row in zip(segments, rows, strict=True)
    )

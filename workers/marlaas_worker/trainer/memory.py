"""A device's memory and a step's micro-batches: what to do when one does not fit.

Which rows share a forward pass decides the order in which gradients are summed, so the token budget of micro-batches is a part of what makes a step: it
is lowered for a whole step, never within one, and committed with the step's version.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from marlaas_api.errors import Permanent
from marlaas_worker.device_errors import OutOfMemory, is_out_of_memory
from marlaas_worker.trainer.batching import MicroBatch
from marlaas_worker.trainer.rows import Row


class RowTooLarge(Permanent):
    """A single segment does not fit the device's memory: no budget is low enough."""


@contextmanager
def memory_errors(batch: MicroBatch) -> Iterator[None]:
    """Raise OutOfMemory, with the micro-batch's size, where the device has no memory for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{batch.num_padded_tokens} tokens ({len(batch.ids)} rows of {batch.ids.shape[1]}) do not fit the device's memory"
        ) from error


def free_memory(device: torch.device) -> None:
    """Give back what a failed computation held: objects in cycles, and the allocator's cache, which is fragmented by then."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lowered_budget(budget: int, rows: Sequence[Row]) -> int:
    """The token budget with which to begin a step anew after a micro-batch of these rows did not fit: half of it, or half of that and so on until
    it is less than what did not fit, since a budget that makes the same micro-batch fails again.

    Raises:
        RowTooLarge: the micro-batch was a single segment, which every budget leaves as it is.
    """
    num_tokens = len(rows) * max(map(len, rows))
    if len(rows) == 1 and rows[0].num_segments == 1:
        raise RowTooLarge(
            f"one conversation of {num_tokens} tokens does not fit the trainer's memory, and a smaller training.microbatchTokens cannot divide it: "
            "lower rollout.maxTokens or rollout.maxTurns in a new job, or give the pool's trainer more memory or a smaller trainer.activationBytes"
        )
    budget //= 2
    while budget >= num_tokens:
        budget //= 2
    return max(1, budget)

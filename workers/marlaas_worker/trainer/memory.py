"""Device memory: errors of a micro-batch that does not fit, and the lower token budget of the next attempt.

The packing of rows decides the order in which gradients are summed, so the token budget is part of a step's
definition. It is lowered for a whole step, never within one, and committed with the step's version.
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
    """A single segment does not fit the device's memory, so no lower budget helps."""


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
    """Free memory that a failed computation held: objects in reference cycles, and the allocator's cache.

    The cache is fragmented after such a failure.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def lowered_budget(budget: int, rows: Sequence[Row]) -> int:
    """Return the token budget with which to restart a step after a micro-batch of these rows did not fit.

    The budget is halved until it is less than the failed micro-batch's size, because a larger one would produce the
    same micro-batch.

    Raises:
        RowTooLarge: the micro-batch was a single segment, which no budget divides.
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

"""A process of its own: one micro-batch's gradient on the trainer's compute thread, in float32 and bfloat16, as `sha256 of its bytes`, `number of threads`."""

import asyncio
import hashlib
import os
import sys

import numpy as np
import torch

from marlaas_worker.trainer.batching import collate
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.lora import initial_weights
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.rows import Segment, chain


def digest(folder):
    return hashlib.sha256(b"".join(gradient(folder, dtype) for dtype in (torch.float32, torch.bfloat16))).hexdigest()


def gradient(folder, dtype):
    base = BaseModel(folder, dtype=dtype)
    adapter = base.attach(8, 16, ())
    adapter.load(initial_weights(adapter.parameters, 0, "policy"))
    adapter.collect_gradients()
    draw = np.random.default_rng(0)
    segments = []
    for length in (150, 170, 200, 230):
        ids = draw.integers(0, base.vocab_size, length).astype(np.int32)
        segments.append(Segment(ids, np.arange(length) > 9, np.zeros(length, np.float32), 0, 1.0))
    batch = collate([chain(segment) for segment in segments])
    base.backward(base.logprobs(adapter, batch, 1.0).sum(), batch)
    return adapter.flat.grad.numpy().tobytes()


async def main():
    compute = Compute(int(sys.argv[2]))
    found = await compute.run(lambda: digest(sys.argv[1]))
    sys.stdout.write(f"{found} {await compute.run(torch.get_num_threads)} {os.environ['MKL_CBWR']}\n")
    compute.close()


asyncio.run(main())

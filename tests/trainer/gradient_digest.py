"""A process of its own: one micro-batch's gradient on the trainer's compute thread, in float32 and bfloat16, as `sha256 of its bytes`, `number of threads`."""

import asyncio
import hashlib
import os
import sys

import torch
from tests.trainer.test_model import attach, collate, gradients, segment

from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.model import BaseModel


def gradient(folder, dtype):
    base = BaseModel(folder, dtype=dtype)
    batch = collate([segment(length, 10, length) for length in (140, 160, 190, 220)])
    return b"".join(one.numpy().tobytes() for one in gradients(base, attach(base, 0, 8, 16), batch).values())


async def main():
    compute = Compute(int(sys.argv[2]))
    found = [await compute.run(lambda of=of: gradient(sys.argv[1], of)) for of in (torch.float32, torch.bfloat16)]
    digest, threads = hashlib.sha256(b"".join(found)).hexdigest(), await compute.run(torch.get_num_threads)
    sys.stdout.write(f"{digest} {threads} {os.environ['MKL_CBWR']}\n")
    compute.close()


asyncio.run(main())

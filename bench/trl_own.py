"""Our side of `bench trl_step`: the trainer role's `Learner` on the same batch."""

import argparse
from pathlib import Path

import numpy as np
import torch

from bench.trainer import ours
from bench.trl_data import SHAPES, Group, answer, batch
from marlaas_worker.trainer.batching import Segment


def segments(group: Group) -> list[Segment]:
    made = []
    for reply, advantage in zip(group.replies, group.advantages, strict=True):
        ids = np.array(group.prompt + reply, np.int32)
        generated = np.arange(len(ids)) >= len(group.prompt)
        behaviour = np.where(generated, -np.log(49152), 0.0).astype(np.float32)
        made.append(Segment(ids, generated, behaviour, 0, advantage))
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--activation-bytes", type=int, help="recompute layers above this; default: never")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    parts = [segments(group) for group in batch(shape)]
    answer(ours(options.model, parts, shape.budget, options.activation_bytes))

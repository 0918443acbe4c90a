"""`torch.compile` of the decoder against eager, in the trainer's forward and backward pass on SmolLM2: `python -m bench compiled`.

Both models are in one process and take their steps in turns. The compile time is reported too: every new process pays
it again.
"""

import statistics
import time
from collections.abc import Callable

import torch

from bench.runs import table
from bench.trainer import groups, microbatches
from marlaas.models import prepare
from marlaas_worker.trainer.batching import collate
from marlaas_worker.trainer.model import BaseModel

MODEL, RANK, ALPHA, BUDGET, SEQUENCES, PAIRS = "smollm2-135m-instruct", 16, 32, 1024, 32, 5


def stepper(compiled: bool) -> Callable[[], float]:
    """Return a function that takes a step of its own model and returns the step's seconds."""
    model = BaseModel(str(prepare(MODEL)))
    adapter = model.attach(RANK, ALPHA, ())
    if compiled:
        model._decoder = torch.compile(model._decoder, dynamic=True)
    rows = microbatches(groups(model.vocab_size, SEQUENCES), model.pairs_per_token, BUDGET)
    batches = [collate(each) for each in rows]

    def step() -> float:
        began = time.perf_counter()
        for batch in batches:
            model.backward(model.logprobs(adapter, batch, 1.0).sum(), batch)
        return time.perf_counter() - began

    return step


def main() -> None:
    eager, compiled = stepper(False), stepper(True)
    eager()
    first = compiled()
    pairs = [(eager(), compiled()) for _ in range(PAIRS)]
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    print(table(["compiling and first step", "eager / compiled"], [[f"{first:.0f} s", f"{ratio:.2f}"]]))

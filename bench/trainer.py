"""Trainer throughput beside a plain transformers + peft loop on the same batch: `python -m bench.trainer --shape tiny`.

Both run one step (GRPO, micro-batches of the same segments): for speed side by side in one process, in turns; for memory in a process of their
own each. The plain loop is what one writes first: attention mask, logits of every position, log_softmax, gather.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.batching import Segment, collate, pack
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.model import BaseModel

SHAPES = {
    "tiny": {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
}  # fmt: skip
RANK, ALPHA, PROMPT_TOKENS, LONGEST_REPLY = 16, 32, 32, 24


def random_model(shape: str, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)


def microbatches(vocab_size: int, count: int, budget: int) -> list[list[Segment]]:
    draw = np.random.default_rng(0)
    segments = []
    for _ in range(count):
        length = PROMPT_TOKENS + int(draw.integers(LONGEST_REPLY // 4, LONGEST_REPLY + 1))
        generated = np.arange(length) >= PROMPT_TOKENS
        behaviour = np.where(generated, -np.log(vocab_size), 0.0).astype(np.float32)
        ids = draw.integers(0, vocab_size, length).astype(np.int32)
        segments.append(Segment(ids, generated, behaviour, 0, float(draw.normal())))
    full, rest = pack([], segments, budget)
    return [*full, rest] if rest else full


def document(budget: int) -> JobDocument:
    spec = {
        "poolRef": {"name": "bench"},
        "agents": [{"name": "policy", "adapter": {"rank": RANK, "alpha": ALPHA}}],
        "environment": {"name": "reverse"},
        "training": {"steps": 1, "microbatchTokens": budget},
    }
    parsed = RLJobSpec.model_validate(spec)
    return JobDocument(namespace="bench", job="bench", uid="1", pool="bench", tenant="bench", spec=parsed)


def ours(folder: Path, batches: list[list[Segment]], budget: int) -> Callable[[], None]:
    job = document(budget)
    learner = Learner(BaseModel(str(folder)), Assignment(job, job.spec.agents[0]))
    learner.begin()

    def step() -> None:
        for batch in batches:
            learner.accumulate(batch)
        learner.step(0)

    return step


def plain(folder: Path, batches: list[list[Segment]], budget: int) -> Callable[[], None]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-4)

    def step() -> None:
        for segments in batches:
            backward(model, segments)
        optimizer.step()
        optimizer.zero_grad()

    return step


def backward(model: Any, segments: list[Segment]) -> None:
    batch = collate(segments)
    ids = torch.from_numpy(batch.ids)
    lengths = torch.tensor([len(segment) for segment in segments])
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=attention).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[torch.from_numpy(batch.rows), torch.from_numpy(batch.columns)] = True
    chosen = logprobs[mask[:, 1:]]
    ratio = (chosen - torch.from_numpy(batch.behaviour)).exp()
    advantages = torch.from_numpy(batch.advantages)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def speeds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both, medians over steps taken in turns after a warm-up; by the wall's clock, and by the processor's, which neighbours
    on the machine disturb less."""
    batches = prepared(arguments)
    steps = {which: make(arguments.folder, batches, arguments.budget) for which, make in MAKERS.items()}
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in steps}
    for turn in range(arguments.repeats + 1):
        for which, step in steps.items():
            began, spent = time.perf_counter(), time.process_time()
            step()
            if turn:
                times[which].append((time.perf_counter() - began, time.process_time() - spent))
    tokens = sum(len(segment) for batch in batches for segment in batch)
    wall = {which: round(tokens / statistics.median(took for took, _ in taken)) for which, taken in times.items()}
    spent_on = {which: statistics.median(spent for _, spent in taken) for which, taken in times.items()}
    rates = {which: round(tokens / seconds) for which, seconds in spent_on.items()}
    ratio = round(spent_on["plain"] / spent_on["ours"], 2)
    return {"tokens": tokens, "tokens_per_s": wall, "tokens_per_cpu_s": rates, "ours_to_plain_cpu": ratio}


def memory(arguments: argparse.Namespace) -> dict[str, int]:
    """Highest resident memory of one of them, in MiB, after three steps."""
    batches = prepared(arguments)
    step = MAKERS[arguments.memory](arguments.folder, batches, arguments.budget)
    for _ in range(3):
        step()
    return {"max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def prepared(arguments: argparse.Namespace) -> list[list[Segment]]:
    torch.set_num_threads(arguments.threads)
    return microbatches(SHAPES[arguments.shape]["vocab_size"], arguments.sequences, arguments.budget)


MAKERS = {"ours": ours, "plain": plain}


def main(words: Sequence[str] = ()) -> None:
    """Measure the shapes one after the other, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: all of them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--budget", type=int, default=1024, help="padded tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=MAKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.folder:
        print(json.dumps(memory(arguments) if arguments.memory else speeds(arguments)))
        return
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        print(json.dumps(compare(shape, list(words))), flush=True)


def compare(shape: str, words: list[str]) -> dict[str, Any]:
    """All figures of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(shape, Path(folder))
        common = [sys.executable, "-m", "bench.trainer", *words, "--shape", shape, "--folder", folder]
        peaks = {which: child([*common, "--memory", which])["max_rss_mib"] for which in MAKERS}
        return {"shape": shape, **child(common), "max_rss_mib": peaks}


def child(command: list[str]) -> dict[str, Any]:
    """The last line that a process prints, as JSON."""
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])

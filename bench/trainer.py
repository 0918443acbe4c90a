"""Trainer throughput against a plain transformers + peft loop on the same batch: `python -m bench trainer --shape tiny`.

Both run one step (GRPO, groups of 8, micro-batches of the same segments): for speed side by side in one process, in
turns; for memory each in its own process. The plain loop is the obvious implementation: attention mask, logits of
every position, log_softmax, gather.
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

from bench import options
from bench.trainer_agents import many, parking
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument
from marlaas_worker.adapters import DTYPES
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.batching import Row, Segment, collate, pack, pack_prefix_tree
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
RANK, ALPHA, GROUP, PROMPT_TOKENS, LONGEST_REPLY = 16, 32, 8, 32, 24


def random_model(shape: str, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)


def groups(vocab_size: int, count: int) -> list[list[Segment]]:
    """Return trajectories by group; the members of a group share their prompt, as in GRPO."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count // GROUP):
        prompt, members = draw.integers(0, vocab_size, PROMPT_TOKENS), []
        for _ in range(GROUP):
            reply = draw.integers(0, vocab_size, int(draw.integers(LONGEST_REPLY // 4, LONGEST_REPLY + 1)))
            ids = np.concatenate([prompt, reply]).astype(np.int32)
            generated = np.arange(len(ids)) >= PROMPT_TOKENS
            behaviour = np.where(generated, -np.log(vocab_size), 0.0).astype(np.float32)
            members.append(Segment(ids, generated, behaviour, 0, float(draw.normal())))
        made.append(members)
    return made


def microbatches(parts: list[list[Segment]], pairs_per_token: int, budget: int) -> list[list[Row]]:
    full, rest = pack([], [row for group in parts for row in pack_prefix_tree(group, pairs_per_token, budget)], budget)
    return [*full, rest] if rest else full


def manifest(budget: int) -> RLJobSpec:
    spec = {
        "poolRef": {"name": "bench"},
        "agents": [{"name": "policy", "adapter": {"rank": RANK, "alpha": ALPHA}}],
        "environment": {"name": "reverse"},
        "training": {"steps": 1, "microbatchTokens": budget},
    }
    return RLJobSpec.model_validate(spec)


def document(budget: int) -> JobDocument:
    spec = job_spec(manifest(budget))
    return JobDocument(namespace="bench", job="bench", uid="1", pool="bench", tenant="bench", spec=spec)


def ours(
    folder: Path,
    parts: list[list[Segment]],
    budget: int,
    activation_bytes: int | None = None,
    dtype: str = "float32",
) -> Callable[[], None]:
    job = document(budget)
    base = BaseModel(str(folder), activation_bytes=activation_bytes, dtype=DTYPES[dtype])
    learner = Learner(base, Assignment(job, job.spec.agents[0]))
    learner.begin()
    batches = microbatches(parts, base.pairs_per_token, budget)

    def step() -> None:
        for batch in batches:
            learner.accumulate(batch)
        learner.step(0, 1)

    return step


def plain(folder: Path, parts: list[list[Segment]], budget: int, dtype: str = "float32") -> Callable[[], None]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]), config).eval()
    batches = microbatches(parts, 0, budget)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-4)

    def step() -> None:
        for rows in batches:
            backward(model, rows)
        optimizer.step()
        optimizer.zero_grad()

    return step


def backward(model: Any, rows: list[Row]) -> None:
    batch = collate(rows)
    ids = torch.from_numpy(batch.ids)
    lengths = torch.tensor([len(row) for row in rows])
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=attention).logits.float()
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    mask = torch.zeros(ids.numel(), dtype=torch.bool)
    mask[torch.from_numpy(batch.before)] = True
    chosen = logprobs[mask.view(ids.shape)[:, :-1]]
    ratio = (chosen - torch.from_numpy(batch.behaviour)).exp()
    advantages = torch.from_numpy(batch.advantages)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def speeds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of both, medians over steps taken in turns after a warm-up.

    They are by wall time and by CPU time, which other load on the machine disturbs less.
    """
    parts = prepared(arguments)
    steps = {
        which: make(arguments.folder, parts, arguments.budget, dtype=arguments.dtype) for which, make in MAKERS.items()
    }
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in steps}
    for turn in range(arguments.repeats + 1):
        for which, step in steps.items():
            began, spent = time.perf_counter(), time.process_time()
            step()
            if turn:
                times[which].append((time.perf_counter() - began, time.process_time() - spent))
    tokens = sum(len(segment) for group in parts for segment in group)
    wall = {which: round(tokens / statistics.median(took for took, _ in taken)) for which, taken in times.items()}
    spent_on = {which: statistics.median(spent for _, spent in taken) for which, taken in times.items()}
    rates = {which: round(tokens / seconds) for which, seconds in spent_on.items()}
    ratio = round(spent_on["plain"] / spent_on["ours"], 2)
    return {"tokens": tokens, "tokens_per_s": wall, "tokens_per_cpu_s": rates, "ours_to_plain_cpu": ratio}


def memory(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the highest resident memory of one of them, in MiB, after three steps."""
    step = MAKERS[arguments.memory](arguments.folder, prepared(arguments), arguments.budget, dtype=arguments.dtype)
    for _ in range(3):
        step()
    return {"max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def prepared(arguments: argparse.Namespace) -> list[list[Segment]]:
    torch.set_num_threads(arguments.threads)
    return groups(SHAPES[arguments.shape]["vocab_size"], arguments.sequences)


MAKERS: dict[str, Callable[..., Callable[[], None]]] = {"ours": ours, "plain": plain}


def main(words: Sequence[str] = ()) -> None:
    """Measure the shapes one after the other, or the named one."""
    parser = options("trainer", __doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: all of them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--budget", type=int, default=1024, help="padded tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the base model, on both sides")
    parser.add_argument(
        "--agents", type=int, default=0, help="CPU per step with so many agents on one trainer; only this"
    )
    parser.add_argument("--steps", type=int, default=4, help="of each agent, with --agents")
    parser.add_argument("--fit", type=int, help="with --agents: also with memory for so many of them at a time")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=MAKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.folder:
        print(json.dumps(memory(arguments) if arguments.memory else speeds(arguments)))
        return
    if arguments.agents:
        with tempfile.TemporaryDirectory() as folder:
            random_model(arguments.shape or "tiny", Path(folder))
            for num_fitting in (0, arguments.fit) if arguments.fit else (0,):
                found = many(Path(folder), arguments.agents, arguments.steps, arguments.threads, num_fitting)
                print(json.dumps(found), flush=True)
            if arguments.fit:
                print(json.dumps({"parking": parking(found, arguments.fit)}), flush=True)
        return
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        print(json.dumps(compare(shape, list(words))), flush=True)


def compare(shape: str, words: list[str]) -> dict[str, Any]:
    """Measure and print all results of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(shape, Path(folder))
        common = [sys.executable, "-m", "bench.trainer", *words, "--shape", shape, "--folder", folder]
        peaks = {which: child([*common, "--memory", which])["max_rss_mib"] for which in MAKERS}
        return {"shape": shape, **child(common), "max_rss_mib": peaks}


def child(command: list[str]) -> dict[str, Any]:
    """Return the last line that a process prints, parsed as JSON."""
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main(sys.argv[1:])

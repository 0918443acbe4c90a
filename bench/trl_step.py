"""The trainer against TRL's `GRPOTrainer` on the same weights, LoRA and batch: `python -m bench trl_step`.

Each side is a process of its own (TRL in its own environment). After a warm-up they take their steps in turns; one is
idle while the other computes. A step is the loss and the backward pass of the whole batch, clipping and AdamW, in
float32. Speed: TRL without gradient checkpointing, at the best of several per-device batch sizes. Memory: the highest
resident memory of a fresh process, in total and above its memory after loading the model.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import options
from bench.runs import table
from bench.sources import ROOT
from bench.trl_data import SHAPES, batch, num_tokens
from bench.trl_env import process_variables, trl_python
from marlaas.models import prepare

MODEL = "smollm2-135m-instruct"


class StepProcess:
    """A loaded process that takes a step on request."""

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self._process = subprocess.Popen(
            [*command],
            cwd=ROOT,
            env=process_variables(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.resident = int(self._read()["resident"])

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                result: dict[str, float] = json.loads(line)
                return result
        raise RuntimeError(f"a process of the comparison exited: {self._process.args!r}")


def our_command(model: Path, shape: str, threads: int, *more: str) -> list[str]:
    words = ["--model", str(model), "--shape", shape, "--threads", str(threads), *more]
    return [sys.executable, "-m", "bench.trl_own", *words]


def trl_command(model: Path, shape: str, per_device: int, *more: str) -> list[str]:
    words = ["--model", str(model), "--shape", shape, "--per-device", str(per_device), *more]
    return [str(trl_python()), "-m", "bench.trl_peer", *words]


def speed(model: Path, shape: str, threads: int, repeats: int) -> list[Any]:
    """Return the tokens per second of both: medians over steps."""
    commands = {"ours": our_command(model, shape, threads)}
    commands |= {f"TRL, {size} at once": trl_command(model, shape, size) for size in SHAPES[shape].per_device}
    sides = {name: StepProcess(command, threads) for name, command in commands.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            took = side.step()
            print(
                f"{shape}, turn {turn}, {name}: {took['wall_s']:.1f} s, {took['cpu_s']:.1f} s of CPU", file=sys.stderr
            )
            if turn:
                times[name].append(took["wall_s"])
    for side in sides.values():
        side.close()
    tokens = num_tokens(batch(SHAPES[shape]))
    rates = {name: tokens / statistics.median(taken) for name, taken in times.items()}
    best = max((name for name in rates if name != "ours"), key=lambda name: rates[name])
    pairs = [trl / own for own, trl in zip(times["ours"], times[best], strict=True)]
    ratio = f"{statistics.median(pairs):.2f} ({min(pairs):.2f}–{max(pairs):.2f})"
    return [shape, tokens, f"{rates['ours']:.0f}", f"{rates[best]:.0f} ({best})", ratio]


def memory(model: Path, shape: str, threads: int) -> list[list[Any]]:
    """Return the peak memory in MiB after two steps, each in a process of its own."""
    commands = {
        "ours": our_command(model, shape, threads),
        "ours, layers recomputed": our_command(model, shape, threads, "--activation-bytes", "0"),
        "TRL, 1 at once": trl_command(model, shape, 1),
        "TRL, 1 at once, gradient checkpointing": trl_command(model, shape, 1, "--checkpointing"),
    }
    rows = []
    for name, command in commands.items():
        side = StepProcess(command, threads)
        side.step()
        last = side.step()
        side.close()
        above, peak, all_of_it = last["peak"] - side.resident, last["peak"], last["max_rss"]
        print(f"{shape}, {name}: {above / 1024:.0f} MiB", file=sys.stderr)
        rows.append([shape, name, *(round(value / 1024) for value in (above, side.resident, peak, all_of_it))])
    return rows


def main(words: Sequence[str] = ()) -> None:
    parser = options("trl_step", __doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: speed of three, memory of one")
    parser.add_argument("--only", choices=("speed", "memory"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args(words)
    model = Path(prepare(MODEL))
    shapes = chosen.shape or ["short", "long reply", "long prompt"]
    if chosen.only != "memory":
        rates = []
        for shape in shapes:
            rates.append(speed(model, shape, chosen.threads, chosen.repeats))
            print(*rates[-1], flush=True)
        print(table(["batch", "tokens", "ours, tokens/s", "TRL, tokens/s", "ours / TRL"], rates), end="\n\n")
    if chosen.only != "speed":
        rows = [row for shape in chosen.shape or ["one long reply"] for row in memory(model, shape, chosen.threads)]
        print(table(["batch", "side", "MiB above loaded", "loaded", "peak since", "ru_maxrss"], rows))

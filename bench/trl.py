"""The arithmetic example trained by TRL's `GRPOTrainer`: `python -m bench trl --seed N [--steps N]`; its last line is JSON.

Same weights, adapter, hyper-parameters, training tasks, rewards and held-out tasks as `marlaas run
examples/arithmetic.yaml --seed N`. wall_s is the whole process, from its start to its end, as `marlaas run`'s is;
train_s leaves out loading and the first evaluation. TRL samples with Hugging Face's generate on the policy itself, so
it is on-policy; it keeps groups without signal where MARLaaS replaces them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import options
from bench.runs import EXAMPLES
from bench.sources import ROOT
from bench.trl_env import process_variables, trl_python
from marlaas.models import prepare


def train(words: Sequence[str], threads: int) -> dict[str, Any]:
    """Run TRL's side, printing its lines as they arrive; return the last one. Raises RuntimeError if it fails."""
    model = prepare("smollm2-135m-instruct")
    command = [str(trl_python()), "-m", "bench.trl_loop", "--model", str(model), "--manifest"]
    command += [str(EXAMPLES / "arithmetic.yaml"), *words]
    began, lines = time.monotonic(), []
    with subprocess.Popen(
        command, cwd=ROOT, env=process_variables(threads), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if line.startswith('{"'):
                lines.append(line)
                print(line, end="", file=sys.stderr, flush=True)
    if process.returncode or not lines:
        raise RuntimeError(f"TRL's side ended with code {process.returncode}")
    return {**json.loads(lines[-1]), "wall_s": round(time.monotonic() - began, 1), "threads": threads}


def main(words: Sequence[str] = ()) -> None:
    parser = options("trl", __doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the manifest's")
    parser.add_argument("--per-device", type=int, default=16, help="completions in one of TRL's backward passes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args(words)
    passed = ["--seed", str(chosen.seed), "--per-device", str(chosen.per_device)]
    passed += ["--steps", str(chosen.steps)] if chosen.steps else []
    print(json.dumps(train(passed, chosen.threads)), flush=True)

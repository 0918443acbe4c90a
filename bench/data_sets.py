"""Data sets: the math reward beside math-verify alone, and a million rows of Parquet: time of `data show`, start and memory of a sandbox.

`python -m bench data_sets`. The pairs come from a generator (fractions, units, intervals, sets, LaTeX), half of them equal.
Times are of fresh processes, first with an empty cache, then with what the first one left in it.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.runs import print_table

NUM_PAIRS, NUM_ROWS, SEED = 2000, 1_000_000, 7
TRUTHS = {"columns": "{{ answer }}", "GSM8K": "{{ answer.split('####')[1] }}"}
_LOAD = """
import json, sys, time
from marlaas_worker.sandbox import forkserver
from marlaas.envs.loading import resolve
began = time.perf_counter()
made = resolve("dataset", json.load(sys.stdin)).create()
took = time.perf_counter() - began
sizes = {line.split(":")[0]: int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith(("VmRSS", "VmHWM"))}
print(json.dumps({"s": took, **sizes}))
"""


def main() -> None:
    pairs()
    rows()


def pairs() -> None:
    """Compare the child process with the library in this process on every pair."""
    from math_verify import parse, verify

    from marlaas.envs.dataset import math_check

    rng, found = random.Random(SEED), []
    began = time.perf_counter()
    for kind, truth, reply in (pair(rng) for _ in range(NUM_PAIRS)):
        found.append((kind, math_check.is_equal(truth, reply), verify(parse(math_check.marked(truth)), parse(reply))))
    took = time.perf_counter() - began
    kinds = sorted({kind for kind, *_ in found})
    print_table(
        ["pairs", "number", "equal", "identical to math-verify", "stopped at the time limit"],
        [
            [
                kind,
                len(mine),
                sum(alone for *_, alone in mine),
                sum(bool(a) == b for _, a, b in mine),
                sum(a is None for _, a, _ in mine),
            ]
            for kind, mine in ((kind, [one for one in found if kind in ("all", one[0])]) for kind in [*kinds, "all"])
        ],
    )
    print(f"\n{took / NUM_PAIRS * 1e3:.1f} ms a pair, both sides together\n")


def pair(rng: random.Random) -> tuple[str, str, str]:
    """Return a kind, a truth, and a reply whose answer is equal to it in half of the pairs, often in another form."""
    kind = rng.choice(("fractions", "units", "intervals", "sets", "LaTeX"))
    a, b, c = rng.randint(1, 30), rng.randint(2, 12), rng.randint(2, 9)
    off = rng.choice((0, 1))
    forms: dict[str, tuple[str, list[str]]] = {
        "fractions": (f"\\frac{{{a}}}{{{b}}}", [f"$\\frac{{{(a + off) * c}}}{{{b * c}}}$", f"so it is {a + off}/{b}.", f"\\boxed{{{a + off}/{b}}}"]),
        "units": (f"{a} \\text{{ cm}}", [f"It is {a + off} cm.", f"$\\boxed{{{a + off}\\text{{ cm}}}}$", f"${a + off}$"]),
        "intervals": (f"({a}, {a + b}]", [f"$({a}, {a + b + off}]$", f"\\boxed{{({a},{a + b}{')' if off else ']'}}}", f"${a} < x \\le {a + b + off}$"]),
        "sets": (f"\\{{{a}, {a + b}\\}}", [f"$\\{{{a + b + off}, {a}\\}}$", f"\\boxed{{{a}, {a + b + off}}}", f"$x = {a}$ or $x = {a + b + off}$"]),
        "LaTeX": (f"{a}\\sqrt{{{b}}}", [f"$\\sqrt{{{(a + off) ** 2 * b}}}$", f"\\boxed{{{a + off}\\sqrt{{{b}}}}}", f"${a} \\cdot {b + off}^{{1/2}}$"]),
    }  # fmt: skip
    truth, replies = forms[kind]
    return kind, truth, rng.choice(replies)


def rows() -> None:
    """Measure a million rows: `data show` as a user calls it, and loading as a sandbox does."""
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
        write(Path(folder) / "rows.parquet")
        print_table(
            ["truth", "cache", "`data show`, s", "environment, s", "RSS, MiB", "peak, MiB"], _measured(Path(folder))
        )


def _measured(folder: Path) -> Any:
    for name, truth in TRUTHS.items():
        for cache in ("empty", "filled"):
            own = {**os.environ, "MARLAAS_CACHE": str(folder / f"cache-{name}")}
            args = {
                "source": {"files": str(folder / "rows.parquet")},
                "prompt": [{"role": "user", "content": "{{ question }}"}],
                "truth": truth,
                "rewards": [{"math": {}}],
            }
            job = {
                "apiVersion": "marlaas.dev/v1alpha1",
                "kind": "RLJob",
                "metadata": {"name": "rows"},
                "spec": {
                    "poolRef": {"name": "any"},
                    "environment": {"name": "dataset", "args": args},
                    "training": {"steps": 1},
                },
            }
            (folder / "job.yaml").write_text(json.dumps(job))
            command = [sys.executable, "-m", "marlaas", "data", "show", str(folder / "job.yaml"), "-n", "5"]
            began = time.perf_counter()
            subprocess.run(command, env=own, check=True, capture_output=True)
            took = time.perf_counter() - began
            if cache == "empty":
                own["MARLAAS_CACHE"] = str(folder / f"cache-sandbox-{name}")
            loaded = subprocess.run(
                [sys.executable, "-c", _LOAD],
                env=own,
                input=json.dumps(args),
                text=True,
                check=True,
                capture_output=True,
            )
            sandbox = json.loads(loaded.stdout)
            yield [name, cache, f"{took:.1f}", f"{sandbox['s']:.1f}", sandbox["VmRSS"], sandbox["VmHWM"]]


def write(path: Path) -> None:
    """Write a million rows like those of GSM8K."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(SEED)
    drawn = [rng.randrange(10**9) for _ in range(NUM_ROWS)]
    questions = [
        f"Anna has {x} apples and buys {x % 97} more bags with {x % 13} apples in each of them. She gives {x % 7} away. How many apples does she have?"
        for x in drawn
    ]
    answers = [
        f"She buys {x % 97} * {x % 13} = {x % 97 * (x % 13)} apples.\n#### {x + x % 97 * (x % 13) - x % 7}"
        for x in drawn
    ]
    pq.write_table(pa.table({"question": questions, "answer": answers}), path)


if __name__ == "__main__":
    main()

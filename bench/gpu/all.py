"""All measurements of this folder in order of value, within a time limit; their tables also as JSON below bench/results/gpu.

Each is a process of its own, so that one that fails, hangs or lacks memory costs only itself. The file is written anew after each.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.sources import ROOT, sources

RESULTS = ROOT / "bench" / "results" / "gpu"
LEAST_S = 15.0
"""A measurement is not begun with less time left."""


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement. seconds: its limit. tiny: its options with the shape `tiny`; None: it needs an engine, and is left out there."""

    name: str
    shape: str
    seconds: float
    options: str = ""
    tiny: str | None = None


STEPS = (
    Step("trainer", "8b", 240, "--agents 2,8", "--batches 2x16 --agents 2,3"),
    Step("trees", "8b", 120, "", "--tokens 300"),
    Step("engine", "smollm2", 300, "--adapters 1,8,32"),
    Step("ceiling", "8b", 90, "", "--tokens 16,32"),
    Step("noise", "smollm2", 90, "", "--rows 2 --prompt 4 --reply 6"),
    Step("trainer", "smollm2", 90, "--agents 2,8"),
    Step("trainer", "1.5b", 90, "--agents 2,8"),
    Step("noise", "8b", 120),
    Step("loop", "smollm2", 300, "--jobs 1,8"),
    Step("engine", "8b", 400, "--adapters 1,8"),
)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu all", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="time for all of them")
    parser.add_argument("--shape", choices=("tiny",), help="try all that need no engine with the smallest shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file of the results; default: bench/results/gpu/CARD-TIME.json")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cpu" and chosen.shape is None:
        parser.error("without a GPU only --shape tiny is measured")
    until, found = time.monotonic() + 60 * chosen.minutes, _head(chosen.device)
    out = chosen.out or RESULTS / f"{found['card'].replace(' ', '-')}-{datetime.now(UTC):%Y%m%dT%H%M}.json"
    for step in STEPS:
        if chosen.shape is None or step.tiny is not None:
            found["measurements"].append(_run(step, chosen, until - time.monotonic()))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nresults: {out}")


def _head(device: str) -> dict[str, Any]:
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    versions = {name: version(name) for name in ("torch", "transformers")}
    began = f"{datetime.now(UTC):%Y-%m-%dT%H:%M}Z"
    return {"card": card, "began": began, "commit": sources().commit, **versions, "measurements": []}


def _run(step: Step, chosen: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run a measurement and return its command, exit code (None: no time), seconds and tables."""
    words = [step.name, "--shape", chosen.shape or step.shape, "--device", chosen.device]
    words += ["--repeats", "1", *(step.tiny or "").split()] if chosen.shape else step.options.split()
    told: dict[str, Any] = {"command": f"python -m bench.gpu {' '.join(words)}", "exit": None, "seconds": 0.0}
    print(f"\n## {told['command']}\n", flush=True)
    if left_s < LEAST_S:
        print(f"left out: {left_s:.0f} s are left")
        return told | {"tables": []}
    began, lines = time.monotonic(), list[str]()
    command = ["timeout", "-k", "5", f"{min(step.seconds, left_s):.0f}", sys.executable, "-m", "bench.gpu", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return told | {"exit": process.returncode, "seconds": round(time.monotonic() - began, 1), "tables": tables(lines)}


def tables(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the markdown tables in a measurement's output, as `shapes.show` prints them."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        if line.startswith("| ") and any(after.startswith("|---") for after in lines[number + 1 : number + 2]):
            found.append({"columns": _cells(line), "rows": []})
        elif found and line.startswith("| "):
            found[-1]["rows"].append(_cells(line))
    return found


def _cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")

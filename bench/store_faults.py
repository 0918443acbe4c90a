"""A blob store that fails in the middle of a job: real runs of the tiny model, each with an S3 server of its own.

Five runs of the same strict job at the same time. One is undisturbed. In the others, from the second step on and for
--seconds, the store answers 403, answers 500, accepts requests and never answers, or is full (507 to writes).
Printed are the reason that the job's progress shows, when it shows it first and how long, the time from the store's
return to the end, and whether the adapter is that of the undisturbed run, bit for bit. Fails if one is not as expected.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import changed_run
from bench.runs import documents, print_table
from bench.s3_server import VERBS, Bucket, serving
from bench.sources import python_path
from marlaas_api.reasons import Reason

STEPS, MIDDLE = 4, 2
ADAPTER = Path("team-a", "reverse", "adapter", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Fault:
    """How a store fails, and the reason that jobs show. refusal: its answer; None: none."""

    name: str
    reason: Reason
    refusal: tuple[int, str] | None = None
    verbs: tuple[str, ...] = VERBS

    def begin(self, bucket: Bucket) -> None:
        bucket.refusal, bucket.refused = self.refusal, self.verbs
        bucket.silence = threading.Event() if self.refusal is None else None

    @staticmethod
    def end(bucket: Bucket) -> None:
        bucket.refusal, silence, bucket.silence = None, bucket.silence, None
        if silence is not None:
            silence.set()


FAULTS = (
    Fault("403", Reason.STORE_REFUSED, (403, "AccessDenied")),
    Fault("500", Reason.STORE_SILENT, (500, "InternalError")),
    Fault("silent", Reason.STORE_SILENT),
    Fault("full", Reason.STORE_FULL, (507, "XMinioStorageFull"), ("PUT", "POST")),
)


@dataclass(slots=True)
class Outcome:
    """What a run showed.

    adapter: its sha256. shown: reasons and messages of the job's progress, with the seconds since the store began to fail. resumed_s: from the
    store's return to the run's end.
    """

    exit_code: int = 0
    adapter: str = ""
    shown: list[tuple[float, str, str]] = field(default_factory=list)
    resumed_s: float = 0.0


def manifests() -> list[dict[str, Any]]:
    """Return a pool with the reference engine, and a strict job."""
    found = {one["metadata"]["name"]: one for one in documents("quickstart.yaml")}
    pool, job = found["tiny"], found["reverse"]
    pool["spec"]["rollout"] = {"engine": "reference", "dtype": "float32", "maxModelLen": 256}
    job["spec"]["training"] |= {"steps": STEPS, "groupsPerStep": 2, "maxStaleness": 0}
    job["spec"]["evaluation"] = {"every": STEPS, "tasks": 8}
    return [pool, job]


def run(fault: Fault | None, seconds: float, folder: Path) -> Outcome:
    """Run the job to its end. fault: of its store, from the middle of the job on; None: none."""
    name = fault.name if fault is not None else "undisturbed"
    out, path = folder / name, folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump_all(manifests(), sort_keys=False))
    command = [sys.executable, "-m", "bench.changed_run", "run", str(path), "--out", str(out), "--json"]
    with serving() as bucket, (folder / f"{name}.log").open("w") as log:
        changes = {changed_run.VARIABLE: "store", changed_run.STORE: "s3://bucket/marlaas", "PYTHONPATH": python_path()}
        variables = {**os.environ, **bucket.variables, **changes}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=variables, text=True)
        try:
            outcome = _follow(process, bucket, fault, seconds)
        except BaseException:
            process.terminate()
            raise
        finally:
            exit_code = process.wait()
    outcome.exit_code = exit_code
    outcome.adapter = hashlib.sha256((out / ADAPTER).read_bytes()).hexdigest() if (out / ADAPTER).exists() else ""
    return outcome


def _follow(process: "subprocess.Popen[str]", bucket: Bucket, fault: Fault | None, seconds: float) -> Outcome:
    """Read a run's progress to its end, and let its store fail after `MIDDLE` steps."""
    outcome, ends, began = Outcome(), threading.Timer(seconds, Fault.end, (bucket,)), math.inf
    try:
        for line in process.stdout or ():
            progress = json.loads(line)
            if progress["type"] != "progress":
                continue
            failing_s = time.monotonic() - began
            if 0 < failing_s < seconds:
                outcome.shown.append((failing_s, progress["reason"], progress["message"]))
            if fault is not None and began == math.inf and progress.get("step", 0) >= MIDDLE:
                fault.begin(bucket)
                ends.start()
                began = time.monotonic()
        outcome.resumed_s = time.monotonic() - began - seconds
    finally:
        ends.cancel()
        Fault.end(bucket)
    return outcome


def problems(fault: Fault, found: Outcome, undisturbed: Outcome) -> list[str]:
    """Return how a run differs from what it must be."""
    expected = [text for _, reason, text in found.shown if reason == fault.reason]
    checks = {
        f"exit code {found.exit_code}": found.exit_code == 0,
        "another adapter than undisturbed": found.adapter == undisturbed.adapter != "",
        f"reason {fault.reason} not shown until the store's return": bool(expected)
        and found.shown[-1][1] == fault.reason,
        "not one time since when": len({text.rpartition("; since ")[2] for text in expected}) == 1,
        "over before the store was back": found.resumed_s > 0,
    }
    return [text for text, is_met in checks.items() if not is_met]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench store_faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long each store fails. [default: 600]")
    options = parser.parse_args(arguments or [])
    runs = (None, *FAULTS)
    folder = Path(tempfile.mkdtemp(prefix="marlaas-bench-"))
    with ThreadPoolExecutor(len(runs)) as threads:
        undisturbed, *found = threads.map(lambda fault: run(fault, options.seconds, folder), runs)
    wrong, rows = [f"undisturbed: exit code {undisturbed.exit_code}"] if undisturbed.exit_code else [], []
    for fault, one in zip(FAULTS, found, strict=True):
        at = [at for at, reason, _ in one.shown if reason == fault.reason] or [math.nan]
        same = "yes" if one.adapter == undisturbed.adapter else "no"
        message = one.shown[-1][2] if one.shown else ""
        message = f"{message[:60]} … {message[-32:]}"
        rows.append([fault.name, fault.reason, f"{at[0]:.0f}", f"{at[-1]:.0f}", f"{one.resumed_s:.0f}", same, message])
        wrong += [f"{fault.name}: {text}" for text in problems(fault, one, undisturbed)]
    print_table(["store", "reason", "first shown, s", "last, s", "return to end, s", "same adapter", "message"], rows)
    if wrong:
        sys.exit(f"{'; '.join(wrong)}; the runs are in {folder}")

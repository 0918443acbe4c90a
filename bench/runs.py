"""Run `marlaas run` as a user would, and measure it from outside: wall time, summary, peak memory of each role, engine busy share."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from bench.sources import ROOT, digest_of, python_path, sources

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a run.

    folder: the run's output folder.
    pss_bytes: peak proportional memory per role, children included; shared memory is divided among the processes.
    records, evals: lines of `steps.jsonl` and `evals.jsonl` by job.
    """

    folder: Path

    wall_s: float
    summary: dict[str, Any]
    pss_bytes: dict[str, int]
    records: dict[str, list[dict[str, Any]]]
    evals: dict[str, list[dict[str, Any]]]

    def jobs(self) -> dict[str, dict[str, Any]]:
        return dict(self.summary["jobs"])


def run(
    manifest: Path | list[dict[str, Any]],
    *,
    seed: int = 0,
    nats: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    changes: str = "",
) -> Run:
    """Run manifests to their end, with the code of this tree. Raises RuntimeError with the end of the run's log if it wrote no summary.

    env: variables of the run beside this process's. changes: of `bench.changed_run`, with commas between them.
    """
    folder = Path(tempfile.mkdtemp(prefix="marlaas-bench-"))
    if isinstance(manifest, list):
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump_all(manifest, sort_keys=False))
        manifest = path
    module = "bench.changed_run" if changes else "marlaas"
    command = [sys.executable, "-m", module, "run", str(manifest), "--out", str(folder), "--seed", str(seed)]
    command += ["--nats", nats] if nats else []
    begun = time.monotonic()
    log = folder.with_suffix(".log")
    with log.open("w") as sink:
        variables = {**os.environ, "PYTHONPATH": python_path(), "CHANGES": changes, **env}
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=variables)
        try:
            memory = _watch(process)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if not (folder / "summary.json").exists():
        raise RuntimeError(log.read_text()[-2000:])
    records, evals = (_lines_of(folder, name) for name in ("steps.jsonl", "evals.jsonl"))
    summary = json.loads((folder / "summary.json").read_text())
    return Run(folder, time.monotonic() - begun, summary, memory, records, evals)


def finished(result: Run) -> Run:
    """Return the run. Raises RuntimeError if a job has not succeeded, for example because the run was stopped."""
    for name, job in result.jobs().items():
        if job["phase"] != "Succeeded":
            raise RuntimeError(
                f"{name} is {job['phase']} after {job['steps']} steps; the run's folder is {result.folder}"
            )
    return result


def strict_jobs(path: Path, manifests: list[dict[str, Any]], seed: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return steps and evaluations of strict jobs by name. A finished run is kept at `path`, and is not repeated."""

    def new() -> dict[str, Any]:
        result = finished(run(manifests, seed=seed))
        return {job: {"steps": result.records[job], "evals": result.evals[job]} for job in result.jobs()}

    found: dict[str, dict[str, list[dict[str, Any]]]] = kept(path, [manifests, seed], new)
    return found


def kept(path: Path, wanted: object, measure: Callable[[], dict[str, Any]], tree: Path = ROOT) -> dict[str, Any]:
    """Return the stored results of a measurement if it was the same, of the same sources; else measure and store.

    wanted: all that it depends on beside the sources. tree: of the sources.
    """
    now = sources(tree)
    key = digest_of([wanted, now.digest])
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored.pop("key", None) == key:
            print(f"{path.stem}: kept result of commit {stored.pop('commit')}", file=sys.stderr, flush=True)
            return stored
    results = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({"key": key, "commit": now.commit} | results))
    draft.replace(path)
    return results


def _lines_of(folder: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    return {
        f"{path.parent.parent.name}/{path.parent.name}": [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob(f"*/*/{name}")
    }


def _watch(process: "subprocess.Popen[bytes]") -> dict[str, int]:
    peak: dict[str, int] = defaultdict(int)
    while process.poll() is None:
        now: dict[str, int] = defaultdict(int)
        for child in _children(process.pid):
            now[child[0]] += child[1]
        for role, size in now.items():
            peak[role] = max(peak[role], size)
        time.sleep(5)  # reading the shared memory of hundreds of processes is slow
    return dict(peak)


def _children(pid: int) -> list[tuple[str, int]]:
    found = []
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    for process in tree:
        try:
            found.append((_role(process), process.memory_full_info().pss))
        except psutil.Error:
            continue
    return found


def _role(process: psutil.Process) -> str:
    """Return the role of a process, from its own or its nearest ancestor's command line."""
    for one in [process, *process.parents()]:
        line = one.cmdline()
        if "marlaas_worker" in line:
            return line[line.index("marlaas_worker") + 1]
        if line and "nats-server" in line[0]:
            return "nats-server"
        if "marlaas" in line:
            return "runner"
    return "other"


def documents(example: str) -> list[dict[str, Any]]:
    """Return the objects of an example manifest."""
    return [dict(one) for one in yaml.safe_load_all((EXAMPLES / example).read_text()) if one]


def changed(example: str, steps: int | None, rate: float | None) -> list[dict[str, Any]]:
    """Return an example's pool and job with other steps and another learning rate. None: the example's value."""
    pool, job = documents(example)
    training = job["spec"]["training"]
    training["steps"] = steps or training["steps"]
    training["optimizer"]["learningRate"] = rate or training["optimizer"]["learningRate"]
    return [pool, job]


def table(headers: list[str], rows: list[list[Any]]) -> str:
    """Format a Markdown table."""
    return "\n".join(_lines(headers, rows))


def print_table(headers: list[str], rows: Iterable[list[Any]]) -> None:
    """Print a Markdown table, each row as soon as it is known."""
    for line in _lines(headers, rows):
        print(line, flush=True)


def _lines(headers: list[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    for line in itertools.chain((headers, ["---"] * len(headers)), rows):
        yield "| " + " | ".join(str(cell) for cell in line) + " |"

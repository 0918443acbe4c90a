"""Runs of `bench multitenant`: each mode of a workload once, kept in a folder, and not repeated if its results are complete.

A run keeps what the figures are computed from: `steps.jsonl` and `episodes.jsonl` of each job as `marlaas run` writes
them, and `usage.jsonl`, processor seconds and memory of each role, sampled every second.
"""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import multitenant_env
from bench.multitenant_workload import Mode, Workload, manifests, name_of

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "marlaas" / "bench"
BEFORE = "3bf58b3"
"""The last commit before the fair queue, the first part of the scheduling of many tenants."""
_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY_EVERY = 15


@dataclass(frozen=True, slots=True)
class Kept:
    """Folder of a complete run, and what was run."""

    workload: Workload
    mode: Mode
    folder: Path


def run(workload: Workload, mode: Mode, out: Path, slots: int, before: str = BEFORE) -> Kept:
    """Run a mode of a workload, or return the kept run. Raises RuntimeError with the end of the log if a job fails."""
    objects = manifests(workload, mode, slots)
    digest = hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()
    folder = out / str(workload) / name_of(mode)
    done = folder / "done.json"
    if done.exists() and json.loads(done.read_text())["manifests"] == digest:
        return Kept(workload, mode, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    _run(objects, mode, folder, worktree(before) if mode.before else ROOT)
    done.write_text(json.dumps({"manifests": digest, "wall_s": time.monotonic() - begun}))
    print(f"{workload} {name_of(mode)}: {time.monotonic() - begun:.0f} s", flush=True)
    return Kept(workload, mode, folder)


def worktree(commit: str) -> Path:
    """Return a checkout of a commit with its own environment, made on first use."""
    folder = CACHE / commit
    if not (folder / ".venv").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
        subprocess.run(["make", "setup"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def _run(objects: list[dict[str, Any]], mode: Mode, folder: Path, tree: Path) -> None:
    path, modules = folder / "jobs.yaml", folder / "modules"
    path.write_text(yaml.safe_dump_all(objects, sort_keys=False))
    modules.mkdir()
    shutil.copy(multitenant_env.__file__, modules)
    jobs = [one for one in objects if one["kind"] == "RLJob"]
    module = "bench.multitenant_lockstep" if mode.lockstep else "marlaas"
    command = [
        str(tree / ".venv" / "bin" / "python"),
        "-m",
        module,
        "run",
        str(path),
        "--out",
        str(folder / "run"),
        "--json",
    ]
    places = [str(modules), *([str(tree)] if mode.lockstep else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "NUM_JOBS": str(len(jobs))}
    log = folder / "run.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=sink, stderr=subprocess.STDOUT)
        usage = UsageRecorder(process.pid, folder / "usage.jsonl")
        thread = threading.Thread(target=usage.record, daemon=True)
        thread.start()
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            usage.stop.set()
            thread.join()
    if code:
        raise RuntimeError(f"{name_of(mode)} ended with code {code}: {log.read_text()[-2000:]}")


@dataclass(slots=True)
class _Process:
    role: str
    parent: int
    cpu_s: float = 0.0


@dataclass(slots=True)
class UsageRecorder:
    """Records processor seconds and memory of a run's processes by role, once a second, as JSON lines.

    A dead process's time is that of its last sample, unless its parent has waited for it and so accounts for it.
    """

    runner: int
    path: Path
    stop: threading.Event = field(default_factory=threading.Event)
    _known: dict[int, _Process] = field(default_factory=dict)
    _gone: dict[str, float] = field(default_factory=dict)

    def record(self) -> None:
        with self.path.open("w") as sink:
            number = 0
            while True:
                ended = self.stop.wait(1.0)
                sample = self._sample(with_memory=number % _MEMORY_EVERY == 0)
                number += 1
                if sample["cpu_s"]:
                    sink.write(json.dumps(sample) + "\n")
                    sink.flush()
                if ended:
                    return

    def _sample(self, with_memory: bool) -> dict[str, Any]:
        stats = _stats()
        live = _descendants(self.runner, stats)
        for pid in live:
            parent, own_s, waited_s = stats[pid]
            process = self._known.get(pid) or _Process(self._role(pid, parent), parent)
            process.cpu_s = own_s + (waited_s if _accounts_for_children(process.role) else 0.0)
            self._known[pid] = process
        for pid in self._known.keys() - live:
            process = self._known.pop(pid)
            parent_process = self._known.get(process.parent)
            if parent_process is None or not _accounts_for_children(parent_process.role):
                self._gone[process.role] = self._gone.get(process.role, 0.0) + process.cpu_s
        cpu_s = dict(self._gone)
        for process in self._known.values():
            cpu_s[process.role] = cpu_s.get(process.role, 0.0) + process.cpu_s
        memory = {"pss_bytes": self._memory()} if with_memory else {}
        return {"at": time.time(), "cpu_s": cpu_s, **memory}

    def _memory(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pid, process in self._known.items():
            found[process.role] = found.get(process.role, 0) + _pss(pid)
        return found

    def _role(self, pid: int, parent: int) -> str:
        line = _command(pid)
        for word, following in itertools.pairwise(line):
            if word in ("marlaas_worker", "bench.multitenant_lockstep") and following != "run":
                return following
        if line and line[0].endswith("nats-server"):
            return "nats-server"
        inherited = self._known.get(parent)
        return inherited.role if inherited else "runner"


def _accounts_for_children(role: str) -> bool:
    """Return whether the processor time of a role's dead children counts as the parent's. The runner's children are roles."""
    return role != "runner"


def _stats() -> dict[int, tuple[int, float, float]]:
    """Return by process id: the parent's id, processor seconds of its own, and of the children that it has waited for."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            user, system, waited_user, waited_system = map(int, fields[11:15])
            found[int(entry.name)] = (int(fields[1]), (user + system) / _TICKS, (waited_user + waited_system) / _TICKS)
    return found


def _descendants(root: int, stats: dict[int, tuple[int, float, float]]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    found, queue = set(), [root] if root in stats else []
    while queue:
        pid = queue.pop()
        found.add(pid)
        queue += children.get(pid, [])
    return found


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    print(worktree(sys.argv[1]))

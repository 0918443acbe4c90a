"""Runs of `bench multitenant`: each mode of a workload, kept in a folder, and not repeated if its results are complete.

A run keeps what the figures are computed from: `steps.jsonl` and `episodes.jsonl` of each job and the roles' logs as
`marlaas run` writes them, `usage.jsonl` (`bench.usage`), and in `done.json` when the command began. A kept run counts only for the manifests and the sources that it was made with.
"""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from bench import changed_run, multitenant_env
from bench.multitenant_workload import Mode, Workload, manifests, name_of
from bench.sources import ROOT, digest_of, python, python_path, sources, worktree
from bench.usage import UsageRecorder
from marlaas.local.interrupts import EXIT_INTERRUPTED

BEFORE = "3bf58b3"
"""The last commit before the fair queue, the first part of the scheduling of many tenants."""
_POLL_S = 0.5


class Driver(Protocol):
    """Changes a run while it goes on, or ends it."""

    def settings(self) -> Mapping[str, Any]:
        """Return all that the driver does, as JSON values, by which kept runs are known."""
        ...

    def look(self, out: Path) -> bool:
        """Look at the run's output folder, twice a second; return True once the run shall be stopped."""
        ...


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Settings of all runs of an invocation.

    Attributes:
        out: folder of the kept runs.
        slots: adapter slots of the engine.
        before: commit of the modes that run an earlier one.
        commit: of the other modes; None: this tree.
        reuse: return kept runs of other sources too.
        memory_every_s: seconds between two samples of memory.
        changes: names of `bench.changed_run`, beside those of the mode.
    """

    out: Path
    slots: int = 16
    before: str = BEFORE
    commit: str | None = None
    reuse: bool = False
    memory_every_s: int = 5
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Start:
    """How a run is started. changes: of `bench.changed_run`. tree: whose code it runs."""

    objects: list[dict[str, Any]]
    folder: Path
    changes: tuple[str, ...]
    tree: Path

    def command(self) -> list[str]:
        module = "bench.changed_run" if self.changes else "marlaas"
        out = str(self.folder / "run")
        return [python(self.tree), "-P", "-m", module, "run", str(self.folder / "jobs.yaml"), "--out", out, "--json"]

    def variables(self) -> dict[str, str]:
        num_jobs = sum(one["kind"] == "RLJob" for one in self.objects)
        places = {"PYTHONPATH": python_path(self.tree, self.folder / "modules"), "NUM_JOBS": str(num_jobs)}
        return os.environ | places | {changed_run.VARIABLE: ",".join(self.changes)}


def run(workload: Workload, mode: Mode, setting: RunSetting, number: int = 0, driver: Driver | None = None) -> Path:
    """Run a mode of a workload, or find the kept run; return its folder. number: of the round.

    Raises RuntimeError with the end of the log if a job fails.
    """
    objects = manifests(workload, mode, setting.slots)
    commit = setting.before if mode.before else setting.commit
    tree = worktree(commit) if commit else ROOT
    changes = (*mode.changes, *setting.changes)
    wanted = digest_of([objects, changes, driver.settings() if driver else None, *_own_code()])
    folder = setting.out / str(workload) / f"round-{number}" / name_of(mode)
    state, name = sources(tree), f"{workload} {name_of(mode)}, round {number}"
    done = folder / "done.json"
    stored = json.loads(done.read_text()) if done.exists() else {}
    if stored.get("wanted") == wanted and (setting.reuse or stored["sources"] == state.digest):
        print(f"{name}: kept run of commit {stored['commit']}", flush=True)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began_at, begun = time.time(), time.monotonic()
    _run(_Start(objects, folder, changes, tree), setting.memory_every_s, driver)
    seconds = time.monotonic() - begun
    made = {"wanted": wanted, "sources": state.digest, "commit": state.commit}
    done.write_text(json.dumps(made | {"began_at": began_at, "wall_s": round(seconds, 1)}))
    print(f"{name}: {seconds:.0f} s, commit {state.commit}", flush=True)
    return folder


def _own_code() -> list[str]:
    """Return the code of this folder that a run executes."""
    return [Path(str(module.__file__)).read_text() for module in (multitenant_env, changed_run)]


def _run(start: _Start, memory_every_s: int, driver: Driver | None) -> None:
    folder, modules = start.folder, start.folder / "modules"
    (folder / "jobs.yaml").write_text(yaml.safe_dump_all(start.objects, sort_keys=False))
    modules.mkdir()
    shutil.copy(multitenant_env.__file__, modules)
    log = folder / "run.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            start.command(), cwd=start.tree, env=start.variables(), stdout=sink, stderr=subprocess.STDOUT
        )
        store = folder / "run" / ".state" / "nats"
        usage = UsageRecorder(process.pid, folder / "usage.jsonl", store, memory_every_s)
        thread = threading.Thread(target=usage.record, daemon=True)
        thread.start()
        try:
            is_stopped = _wait(process, driver, folder / "run")
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            usage.stop.set()
            thread.join()
    if process.returncode not in ((0, EXIT_INTERRUPTED) if is_stopped else (0,)):
        raise RuntimeError(f"{folder} ended with code {process.returncode}: {log.read_text()[-2000:]}")


def _wait(process: "subprocess.Popen[bytes]", driver: Driver | None, out: Path) -> bool:
    """Wait for the end of a run; return whether its driver has stopped it."""
    while driver is not None and process.poll() is None:
        if driver.look(out):
            process.terminate()
            process.wait()
            return True
        time.sleep(_POLL_S)
    process.wait()
    return False

"""Drivers of the runs of `bench soak`: jobs that come and go, and a time limit."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.multitenant_workload import Mode, Workload, manifests
from marlaas.local.changes import RunChange, ask
from marlaas.local.documents import read
from marlaas.local.folder import OutFolder
from marlaas_api.messages import JobDocument

ENDLESS, _SLOTS = 10_000, 16


@dataclass(slots=True)
class TimeLimit:
    """Stops a run after so many seconds. None: never."""

    limit_s: float | None
    _began: float = field(default_factory=time.monotonic)

    def settings(self) -> Mapping[str, Any]:
        return {"limit_s": self.limit_s}

    def look(self, out: Path) -> bool:
        return self.limit_s is not None and time.monotonic() > self._began + self.limit_s


@dataclass(frozen=True, slots=True)
class Progress:
    """Numbers of jobs: the running ones with their finished steps, and those that have not begun. num_left: of the latter."""

    running: Mapping[int, int]
    num_left: int


def ended(progress: Progress, steps: int) -> list[int]:
    """Return the running jobs that have made their steps. The last ones go on until all have, so that no run ends early."""
    done = [number for number, made in progress.running.items() if made >= steps]
    return done if progress.num_left or len(done) == len(progress.running) else []


@dataclass(slots=True)
class Churn:
    """Jobs that come and go: a job that has made its steps is cancelled, and the next one is submitted.

    `marlaas cancel` deletes everything that the bus has of a job, as the operator does after `ttlSecondsAfterFinished`;
    `marlaas run` deletes no finished jobs. So jobs have more steps than they make. The run begins with the first jobs.

    workload: all jobs. steps: of each job.
    """

    workload: Workload
    steps: int
    at_once: int
    limit: TimeLimit
    mode: Mode
    _documents: list[JobDocument] = field(default_factory=list)
    _running: set[int] = field(default_factory=set)
    _next: int = 0

    def first(self) -> Workload:
        """Return the workload with which the run begins."""
        return Workload(self.at_once, self.workload.wait_s, ENDLESS, self.workload.seed)

    def settings(self) -> Mapping[str, Any]:
        return {"jobs": self.workload.num_jobs, "steps": self.steps, "at_once": self.at_once, **self.limit.settings()}

    def look(self, out: Path) -> bool:
        if not self._documents:
            self._documents = self._read(out.parent / "modules" / "jobs.yaml")
            self._running, self._next = set(range(self.at_once)), self.at_once
        made = {number: self._num_steps(out, number) for number in self._running}
        done = ended(Progress(made, len(self._documents) - self._next), self.steps)
        if self.limit.look(out) or len(done) == len(self._running):
            return True
        if done:
            self._replace(out, done)
        return False

    def _replace(self, out: Path, done: Sequence[int]) -> None:
        new = range(self._next, min(self._next + len(done), len(self._documents)))
        keys = tuple(self._documents[number].ref.key for number in done)
        ask(OutFolder(out.absolute()), RunChange(jobs=tuple(self._documents[one] for one in new), cancel=keys))
        self._running = (self._running - {*done}) | {*new}
        self._next = new.stop

    def _read(self, path: Path) -> list[JobDocument]:
        """Return the documents of all jobs. path: beside the module of their environment."""
        workload = Workload(self.workload.num_jobs, self.workload.wait_s, ENDLESS, self.workload.seed)
        path.write_text(yaml.safe_dump_all(manifests(workload, self.mode, _SLOTS)))
        return list(read([str(path)], None).jobs)

    def _num_steps(self, out: Path, number: int) -> int:
        ref = self._documents[number].ref
        path = out / ref.namespace / ref.name / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

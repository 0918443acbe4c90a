"""One real run, as a user has it: `marlaas run` with vLLM, a nats-server and all roles as processes, changed, killed, stopped and continued.

Two jobs are trained on a pool with vLLM, one of them until it has learnt. A strict team of a pool with the reference engine makes exact adapters: while it trains, a
process of each kind is killed. A job is suspended and resumed, one is added, and one is cancelled. The run is stopped by Ctrl-C
after its engine was killed, and continued by the same command, from Python.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tests.loop import jobs
from tests.loop.harness import ENVIRONMENTS
from tests.loop.runs import exact_team
from typer.testing import CliRunner

from marlaas import Run
from marlaas.cli.app import build

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
HEAD = {"apiVersion": "marlaas.dev/v1alpha1"}
SEED = 7
STEPS, GROUPS = {"reverse": 10, "calculator": 12}, {"reverse": 8, "calculator": 3}
"""Steps of the jobs of the quickstart, which has more, and their groups. `reverse` learns in them. `calculator` plays several turns, and
keeps the pool at work while `reverse` is suspended: otherwise vLLM would be stopped, and started once more.
"""
TOOL_S = 1.0
"""Seconds of a tool call of `calculator`, so that its steps take long and cost little."""
HELD_OUT = {"reverse": 80, "calculator": 8}
"""Held-out tasks. Those of `reverse` have a standard deviation of 0.06 at 0.5; it rises by about 0.6."""
LEARNING, SEVERAL_TURNS = "team-a/reverse", "team-b/calculator"
TEAM, ADDED, CANCELLED = "team-a/exact", "team-c/added", "team-a/cancelled"
Rule = tuple[Callable[[], bool], Callable[[], None]]
"""A condition, and an action."""
VICTIMS = (("sandbox",), ("orchestrator",), ("nats-server",), ("trainer-0.exact", "rollout-0.exact"))
"""Processes that are killed one after another, each when the team has finished another step; the last two start anew at the same time."""
ENGINE = "rollout-0.tiny"


def manifest_of(job):
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"poolRef": {"name": job.pool}}
    return HEAD | {"kind": "RLJob", "metadata": {"name": job.job, "namespace": job.namespace}, "spec": spec}


def exact_pool():
    rollout = {"engine": "reference", "dtype": "float32", "maxModelLen": 256}
    spec = {"model": {"builtin": "tiny"}, "adapterSlots": 4, "maxRank": 8, "rollout": rollout}
    return HEAD | {"kind": "ModelPool", "metadata": {"name": "exact"}, "spec": spec}


def small_job(name, steps):
    namespace, _, own = name.partition("/")
    job = jobs.document(own, steps=steps, groupsPerStep=1, maxRefill=0)
    return job.model_copy(update={"pool": "exact", "namespace": namespace})


@dataclass
class Tour:
    """Outputs and results of a tour.

    lines: of the first run. code: its exit code. said: what commands printed, by their names. killed: in this order. followed: steps of
    `reverse` that were read while the second run went on. summary: its jobs.
    """

    out: Path
    temporary: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    followed: list[int] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)

    def progress(self, job):
        return [line for line in self.lines if line["type"] == "progress" and line["job"] == job]

    def notes(self):
        return [str(line["message"]) for line in self.lines if line["type"] == "note"]

    def steps(self, job):
        return [json.loads(line) for line in (self.out / job / "steps.jsonl").read_text().splitlines()]


def play(folder):
    manifest, added = folder / "tour.yaml", folder / "added.yaml"
    jobs_of_exact = exact_team("exact"), small_job(CANCELLED, 500)
    manifest.write_text(_quickstart() + yaml.safe_dump_all([exact_pool(), *map(manifest_of, jobs_of_exact)]))
    added.write_text(yaml.safe_dump_all([exact_pool(), manifest_of(small_job(ADDED, 1))]))
    tour = Tour(folder / "out", folder / "temporary")
    tour.temporary.mkdir()
    options = ["--out", str(tour.out), "--seed", str(SEED), "--json"]
    with _run(tour, [sys.executable, "-m", "marlaas", "run", str(manifest), *options]) as process:
        _do_all(tour, process, _rules(tour, process, added))
        _kill(tour, process, ENGINE)
        process.send_signal(signal.SIGINT)
    manifest.write_text(_quickstart() + yaml.safe_dump_all([exact_pool(), manifest_of(jobs_of_exact[0])]))
    (again,) = (note for note in tour.notes() if note.startswith("to continue: "))
    _, _, *arguments = shlex.split(again.removeprefix("to continue: "))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _variables(tour).items():
            patch.setenv(name, value)
        run = Run.start(out=tour.out, options=arguments)
    tour.followed = [step.step for step in run.steps(LEARNING)]
    tour.summary = run.wait()
    return tour


def _quickstart():
    """The quickstart with fewer steps, and other held-out tasks, which are played at the beginning and at the end."""
    objects = list(yaml.safe_load_all(QUICKSTART.read_text()))
    for job in objects:
        if job["kind"] == "RLJob":
            name = job["metadata"]["name"]
            job["spec"]["training"] |= {"steps": STEPS[name], "groupsPerStep": GROUPS[name]}
            job["spec"]["evaluation"] = {"every": 1000, "tasks": HELD_OUT[name]}
            if name == "calculator":
                job["spec"]["environment"]["args"] = {"tool_latency_s": TOOL_S}
    return yaml.safe_dump_all(objects) + "---\n"


def _variables(tour):
    places = os.pathsep.join(map(str, ENVIRONMENTS))
    return {"OMP_NUM_THREADS": "1", "TMPDIR": str(tour.temporary), "PYTHONPATH": places}


@contextlib.contextmanager
def _run(tour, command):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | _variables(tour)) as process:
        try:
            yield process
            for _ in _lines(tour, process):
                pass
        finally:
            process.kill()
    tour.code = process.returncode


def _lines(tour, process):
    for text in process.stdout:
        tour.lines.append(json.loads(text))
        yield tour.lines[-1]


def _do_all(tour, process, rules):
    """Read the run's lines until all actions are done, each once its condition holds; one a line."""
    for _ in _lines(tour, process):
        due = next((rule for rule in rules if rule[0]()), None)
        if due is not None:
            due[1]()
            rules.remove(due)
        if not rules:
            return
    raise AssertionError(f"the run has ended, and {len(rules)} actions are left: {tour.lines[-5:]}")


def _step(tour, job):
    """The job's last step that was told; -1 before it has any progress."""
    return max((int(line.get("step", -1)) for line in tour.progress(job)), default=-1)


def _phase(tour, job):
    return str(tour.progress(job)[-1]["phase"]) if tour.progress(job) else ""


def _has_ended(tour, job):
    return _phase(tour, job) in ("Succeeded", "Failed")


def _rules(tour, process, added):
    """What is done, and when: kills while the team trains, and changes of the other jobs."""
    rules: list[Rule] = [(lambda: _step(tour, CANCELLED) >= 1, lambda: _command(tour, "cancel", "cancelled"))]
    for number, names in enumerate(VICTIMS, 1):
        is_due = partial(lambda number: _step(tour, TEAM) >= number and not _has_ended(tour, TEAM), number)
        rules.append((is_due, partial(_kill, tour, process, *names)))

    def may_resume():
        """The team goes on after the last kill: the processes that were killed have been started in this run, not in the next one."""
        has_gone_on = len(tour.killed) == sum(map(len, VICTIMS)) and _step(tour, TEAM) > len(VICTIMS)
        return "why" in tour.said and has_gone_on

    def may_stop():
        return "resume" in tour.said and _step(tour, LEARNING) >= 4 and not _has_ended(tour, LEARNING)

    return [
        *rules,
        (lambda: _step(tour, TEAM) >= 1, lambda: _command(tour, "submit", str(added))),
        (lambda: _step(tour, LEARNING) >= 1, lambda: _command(tour, "suspend", "reverse")),
        (lambda: _phase(tour, LEARNING) == "Suspended", lambda: _command(tour, "why", "reverse")),
        (may_resume, lambda: _command(tour, "resume", "reverse")),
        (may_stop, lambda: None),
    ]


def _kill(tour, process, *names: str):
    """kill -9 roles, by their names or their replicas' and their pools', or the nats-server."""
    for name in names:
        found = [one for one in psutil.Process(process.pid).children(recursive=True) if name in _names(one)]
        assert found, f"{name} does not run"
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # sandboxes end with the process that forked them
                one.send_signal(signal.SIGKILL)
        tour.killed.append(name)


def _names(process):
    """The names of a process: a role's and the one of its folder, which is the replica's, or the program's."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return []
    if "marlaas_worker" not in line:
        return [Path(one).name for one in line[:1]]
    folder = line[line.index("--scratch") + 1] if "--scratch" in line else ""
    return [line[line.index("marlaas_worker") + 1], Path(folder).name]


def _command(tour, *words: str):
    arguments = [*words, "--run", str(tour.out)]
    done = CliRunner().invoke(build(arguments), arguments)
    assert done.exit_code == 0, done.output
    tour.said[words[0]] = done.output

"""A well-behaved tenant beside bad neighbours, and a new tenant among many: real runs of the tiny model on this machine.

attack: seconds per step (median) of one `calculator` job (8 episodes a step, tools of 0.4 s) in a run with one other tenant of
equal weight: nobody; a peer with 8 jobs of the same kind, which leaves it its entitled share; 100 jobs of the same kind at
once; 8 jobs whose prompts fill the context; whose environments hang; whose environments compute; that flood the engine
with short turns. Printed is the ratio to the peer, and where the time goes: mean seconds of the slowest episode of each step in
the engine, before the engine, in tools and elsewhere, and of the step after that episode.
newcomer: seconds from `marlaas submit` of a new tenant's job to its first step, in a run of 31 jobs of other tenants, and in
one of a single job.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from bench import multitenant_env, neighbour_env, options
from bench.multitenant_workload import Mode, Workload, manifests
from bench.runs import print_table
from marlaas.episodes.files import read
from marlaas.episodes.record import EpisodeRecord
from marlaas_api.names import Split
from marlaas_worker.orchestrator.experience import group_index

WAIT_S, SLOTS, ENDLESS = 0.4, 16, 10_000
STRICT = Mode("D", strict=True, together=True)
GOOD = "team-good"
ATTACKS = ("nobody", "peer", "many", "giant", "hanging", "busy", "flood")
PARTS = ("engine", "before it", "tools", "elsewhere", "after the episode")
_POLL_S, _TIMEOUT_S = 0.1, 400.0
Manifest = dict[str, Any]


def jobs(number: int, namespace: str | None = None) -> list[Manifest]:
    """Return jobs that run until they are cancelled; in one namespace, or in those of the workload."""
    made = [one for one in manifests(Workload(number, WAIT_S, ENDLESS), STRICT, SLOTS) if one["kind"] == "RLJob"]
    for one in made:
        one["metadata"]["namespace"] = namespace or one["metadata"]["namespace"]
    return made


def pool() -> Manifest:
    """Return the pool of all runs."""
    return manifests(Workload(1, WAIT_S, 1), STRICT, SLOTS)[0]


def neighbours(attack: str) -> list[Manifest]:
    """Return the jobs of the other tenant."""
    if attack == "nobody":
        return []
    made = jobs(100 if attack == "many" else 8, "team-other")
    if attack in ("peer", "many"):
        return made
    for one in made:
        one["spec"]["environment"] = {"name": f"neighbour_env:{attack}"}
        if attack == "flood":
            one["spec"]["rollout"] |= {"maxTurns": 64, "maxTokens": 1}
    return made


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with a folder before the others of PYTHONPATH."""
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *before])}


@contextmanager
def running(objects: Sequence[Manifest], folder: Path) -> Iterator[Path]:
    """Run `marlaas run` while the context is open; yield its output folder."""
    folder.mkdir()
    for module in (multitenant_env, neighbour_env):
        assert module.__file__ is not None
        shutil.copy(module.__file__, folder)
    path, out = folder / "jobs.yaml", folder / "run"
    path.write_text(yaml.safe_dump_all(copy.deepcopy(list(objects)), sort_keys=False))
    command = [sys.executable, "-m", "marlaas", "run", str(path), "--out", str(out), "--json"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield out
        finally:
            process.terminate()
            process.wait()


def steps(out: Path, namespace: str, name: str) -> list[float]:
    """Return the unix times of a job's finished steps."""
    path = out / namespace / name / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(json.loads(line)["at"]) for line in lines]


def wait_for_steps(out: Path, job: Manifest, number: int) -> list[float]:
    """Wait until a job has made so many steps. Raises TimeoutError."""
    began = time.monotonic()
    while len(found := steps(out, job["metadata"]["namespace"], job["metadata"]["name"])) < number:
        if time.monotonic() - began > _TIMEOUT_S:
            raise TimeoutError(f"{job['metadata']} has made {len(found)} of {number} steps in {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return found


def step_s(attack: str, number: int, folder: Path) -> tuple[float, list[float]]:
    """Return the median seconds of a step of the well-behaved job, after two steps to begin with, and `parts` of its steps."""
    (own,) = jobs(1, GOOD)
    with running([pool(), own, *neighbours(attack)], folder / attack) as out:
        found = wait_for_steps(out, own, number + 3)
    records = [json.loads(line) for line in (out / GOOD / own["metadata"]["name"] / "steps.jsonl").open()]
    episodes = list(read(out / GOOD / own["metadata"]["name"]))
    return median(after - before for before, after in pairwise(found[2:])), parts(records[3:], episodes)


def parts(records: Sequence[dict[str, Any]], episodes: Sequence[EpisodeRecord]) -> list[float]:
    """Return mean seconds of the parts of a step: `PARTS`. Steps without a recorded episode are left out.

    records: lines of `steps.jsonl`.
    """
    rows = []
    for record in records:
        own = [one for one in episodes if one.split is Split.TRAIN and group_index(one.group) in record["indices"]]
        if own:
            slowest = max(own, key=lambda one: one.duration_s)
            engine_s, queue_s = (sum(getattr(turn, part) for turn in slowest.turns) for part in ("engine_s", "queue_s"))
            rest_s = slowest.duration_s - engine_s - queue_s - slowest.tool_s
            rows.append([engine_s, queue_s, slowest.tool_s, rest_s, record["wall_s"] - slowest.duration_s])
    return [fmean(column) for column in zip(*rows, strict=True)]


def newcomer_s(others: int, folder: Path) -> float:
    """Return the seconds from the submission of a new tenant's job to its first step, in a run that is under way."""
    old = jobs(others)
    (own,) = jobs(1, GOOD)
    own["metadata"]["name"] = "new"
    with running([pool(), *old], folder / f"newcomer-{others}") as out:
        wait_for_steps(out, old[0], 3)
        path = out.parent / "new.yaml"
        path.write_text(yaml.safe_dump_all([pool(), own]))
        began = time.time()
        command = [sys.executable, "-m", "marlaas", "submit", "--run", str(out), str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(out.parent))
        return wait_for_steps(out, own, 1)[0] - began


def attack_rows(attacks: Collection[str], num_steps: int, folder: Path) -> Iterator[list[Any]]:
    """Measure the attacks in the order of `ATTACKS`, so that the peer is known before those that are compared with it."""
    peer = None
    for attack in sorted(attacks, key=ATTACKS.index):
        seconds, where = step_s(attack, num_steps, folder)
        peer = seconds if attack == "peer" else peer
        yield [attack, f"{seconds:.2f}", f"{seconds / peer:.2f}" if peer else "", *(f"{one:.2f}" for one in where)]


def newcomer_rows(numbers: Collection[int], folder: Path) -> Iterator[list[Any]]:
    """Measure a newcomer among so many jobs of others; the ratio is to the first number."""
    first = None
    for others in numbers:
        seconds = newcomer_s(others, folder)
        first = first or seconds
        yield [others, f"{seconds:.1f}", f"{seconds / first:.2f}"]


def main(words: Sequence[str] = ()) -> None:
    parser = options("neighbours", __doc__)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--steps", type=int, default=12, help="measured steps; default: %(default)s")
    parser.add_argument("--others", nargs="*", type=int, default=[1, 31], help="jobs before the newcomer")
    chosen: argparse.Namespace = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.attacks:
            head = ["other tenant", "seconds per step", "against the peer", *PARTS]
            print_table(head, attack_rows(chosen.attacks, chosen.steps, folder))
        if chosen.others:
            print(flush=True)
            print_table(["jobs of others", "newcomer's first step, s", "ratio"], newcomer_rows(chosen.others, folder))

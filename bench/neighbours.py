"""A well-behaved tenant beside bad neighbours, and a new tenant among many: real runs of the tiny model on this machine.

attack: seconds per step (median) of one `calculator` job (8 episodes a step, tools of 0.4 s) in a run with one other tenant of
equal weight: nobody; a peer with 8 jobs of the same kind, which leaves it its entitled share; 100 jobs of the same kind at
once; 8 jobs whose prompts fill the context; whose environments hang; whose environments compute; that flood the engine
with short turns. In each round, every attack is measured after a peer of its own, and compared with it. Printed are the ratio of
the medians over all rounds with its 90 % interval (bootstrap over rounds and steps), the ratio of each round, and where the
time goes: mean seconds of the slowest episode of each step in the engine, before the engine, in tools and elsewhere, and of
the step after that episode.
Measurements are kept under --out, and not repeated with the same sources.

newcomer: seconds from `marlaas submit` of a new tenant's job to its first step, in a run of 31 jobs of other tenants, and in
one of a single job.
"""

import argparse
import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from bench import multitenant_env, neighbour_env, options
from bench.multitenant_workload import Mode, Workload, manifests
from bench.rounds import bootstrap, spread
from bench.runs import kept, print_table
from bench.sources import CACHE, ROOT, python_path
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


def tenants(made: Sequence[Manifest]) -> list[Manifest]:
    """Return a Tenant for each namespace of the jobs; without one, all namespaces are one tenant's."""
    head = {"apiVersion": "marlaas.dev/v1alpha1", "kind": "Tenant"}
    names = sorted({one["metadata"]["namespace"] for one in made})
    return [{**head, "metadata": {"name": name}, "spec": {"namespaces": [name]}} for name in names]


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
    """Return the environment of a run of this tree's code, which finds modules in a folder too."""
    return os.environ | {"PYTHONPATH": python_path(ROOT, folder)}


@contextmanager
def running(objects: Sequence[Manifest]) -> Iterator[Path]:
    """Run `marlaas run` while the context is open; yield its output folder."""
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w") as log:
        path, out = Path(scratch) / "jobs.yaml", Path(scratch) / "run"
        for module in (multitenant_env, neighbour_env):
            shutil.copy(str(module.__file__), scratch)
        path.write_text(yaml.safe_dump_all(copy.deepcopy(list(objects)), sort_keys=False))
        command = [sys.executable, "-m", "marlaas", "run", str(path), "--out", str(out), "--json"]
        process = subprocess.Popen(command, env=environment(path.parent), stdout=log, stderr=subprocess.STDOUT)
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


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps of the well-behaved job: seconds of each, and mean seconds of `PARTS`."""

    seconds: list[float]
    parts: list[float]


def objects_of(attack: str) -> list[Manifest]:
    """Return the pool, the tenants, and the jobs of a measurement; the last object is the well-behaved job."""
    made = [*neighbours(attack), *jobs(1, GOOD)]
    return [pool(), *tenants(made), *made]


def measure(attack: str, number: int, path: Path) -> Steps:
    """Return so many steps of the well-behaved job, after two steps to begin with; kept in a file."""
    objects = objects_of(attack)
    own = objects[-1]

    def new() -> dict[str, Any]:
        with running(objects) as out:
            found = wait_for_steps(out, own, number + 3)
            records = [json.loads(line) for line in (out / GOOD / own["metadata"]["name"] / "steps.jsonl").open()]
            where = parts(records[3:], list(read(out / GOOD / own["metadata"]["name"])))
        return asdict(Steps([after - before for before, after in pairwise(found[2:])], where))

    return Steps(**kept(path, [objects, number, *_own_code()], new))


def _own_code() -> list[str]:
    return [Path(str(module.__file__)).read_text() for module in (multitenant_env, neighbour_env)]


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


def newcomer_s(others: int, path: Path) -> float:
    """Return the seconds from the submission of a new tenant's job to its first step, in a run that is under way; kept in a file."""
    old = jobs(others)
    (own,) = jobs(1, GOOD)
    own["metadata"]["name"] = "new"
    objects = [pool(), *tenants(old), *old]
    return float(
        kept(path, [objects, own, *_own_code()], lambda: {"seconds": _newcomer_s(objects, old[0], own)})["seconds"]
    )


def _newcomer_s(objects: Sequence[Manifest], first: Manifest, own: Manifest) -> float:
    with running(objects) as out:
        wait_for_steps(out, first, 3)
        path = out.parent / "new.yaml"
        path.write_text(yaml.safe_dump_all([pool(), *tenants([own]), own]))
        began = time.time()
        command = [sys.executable, "-m", "marlaas", "submit", "--run", str(out), str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(out.parent))
        return wait_for_steps(out, own, 1)[0] - began


def plan(attacks: Collection[str]) -> list[str]:
    """Return what a round measures, in order: each attack after a peer of its own."""
    others = [one for one in ATTACKS[2:] if one in attacks]
    first = [one for one in ATTACKS[: 1 if others else 2] if one in attacks]
    return first + [one for attack in others for one in ("peer", attack)]


def attack_rows(attacks: Collection[str], num_steps: int, rounds: int, folder: Path) -> Iterator[list[Any]]:
    """Measure the attacks; yield a row for each measurement, and then the rows of `ratio_rows`."""
    found: dict[str, list[tuple[Steps, Steps | None]]] = {}
    for number in range(rounds):
        last = None
        for place, attack in enumerate(plan(attacks)):
            steps = measure(attack, num_steps, folder / f"{number}-{place}-{attack}.json")
            peer, last = (None, steps) if attack == "peer" else (last, last)
            found.setdefault(attack, []).append((steps, peer))
            ratio = "" if peer is None else f"{median(steps.seconds) / median(peer.seconds):.2f}"
            yield [attack, number, f"{median(steps.seconds):.2f}", ratio, "", *(f"{one:.2f}" for one in steps.parts)]
    if rounds > 1 or len(found) > 1:
        yield from ratio_rows(found)


def ratio_rows(found: Mapping[str, Sequence[tuple[Steps, Steps | None]]]) -> Iterator[list[Any]]:
    """Yield a row for each other tenant over all rounds. found: measurements, each with its peer's."""
    for attack, measured in found.items():
        own = [steps.seconds for steps, _ in measured]
        bases = [peer.seconds for _, peer in measured if peer is not None]
        all_steps = median(itertools.chain(*own))
        ratio, interval = "", ""
        if len(bases) == len(own):
            low, high = bootstrap(own, bases)
            ratio, interval = f"{all_steps / median(itertools.chain(*bases)):.2f}", f"{low:.2f} to {high:.2f}"
        means = [fmean(column) for column in zip(*(steps.parts for steps, _ in measured), strict=True)]
        yield [f"**{attack}**", "all", f"{all_steps:.2f}", ratio, interval, *(f"{one:.2f}" for one in means)]


def newcomer_rows(numbers: Collection[int], rounds: int, folder: Path) -> Iterator[list[Any]]:
    """Measure a newcomer among so many jobs of others in each round; the ratio is to the first number of the same round."""
    ratios: dict[int, list[float]] = {}
    for number in range(rounds):
        first = None
        for others in numbers:
            seconds = newcomer_s(others, folder / f"{number}-newcomer-{others}.json")
            first = first or seconds
            ratios.setdefault(others, []).append(seconds / first)
            yield [others, number, f"{seconds:.1f}", f"{seconds / first:.2f}"]
    if rounds > 1:
        for others, found in ratios.items():
            yield [f"**{others}**", "all", "", spread(found)]


def main(words: Sequence[str] = ()) -> None:
    parser = options("neighbours", __doc__)
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--steps", type=int, default=12, help="measured steps; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="of the attacks and the newcomers; default: %(default)s")
    parser.add_argument("--others", nargs="*", type=int, default=[1, 31], help="jobs before the newcomer")
    parser.add_argument("--out", type=Path, default=CACHE / "neighbours", help="kept results; default: %(default)s")
    chosen: argparse.Namespace = parser.parse_args(words)
    if chosen.attacks:
        head = ["other tenant", "round", "seconds per step", "against its peer", "90 % interval", *PARTS]
        print_table(head, attack_rows(chosen.attacks, chosen.steps, chosen.rounds, chosen.out))
    if chosen.others:
        print(flush=True)
        head = ["jobs of others", "round", "newcomer's first step, s", "ratio"]
        print_table(head, newcomer_rows(chosen.others, chosen.rounds, chosen.out))

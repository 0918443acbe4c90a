"""Single-agent measurements by this tree and by an earlier commit, in turns: which numbers are within a tenth.

--before: the last commit before several agents in a job. In each round every measurement is made by both, and the order
alternates. A measurement is `python -m bench NAME` in each tree (the earlier one a worktree in the cache), whose printed numbers
are paired by name (`printed_numbers`); a number may be better when larger or when smaller. `multitenant` is mode A with 8
jobs, run by this tree's bench with the code of each: steps/s, the engine's busy share, and CPU. Outputs are kept under
--out, and not repeated with the same sources.
"""

import argparse
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import multitenant_figures as figures
from bench import options
from bench.multitenant_runs import RunSetting, run
from bench.multitenant_workload import Mode, Workload
from bench.printed_numbers import compared, numbers, unmatched
from bench.runs import kept, table
from bench.sources import CACHE, ROOT, python, python_path, worktree

BEFORE = "4ec14e8"
"""The last commit before several agents in a job."""
CASES: Mapping[str, tuple[str, ...]] = {
    "bus": ("--number", "2000"),
    "groups": (),
    "sandbox": (),
    "trainer": ("--shape", "tiny", "--repeats", "9"),
    "orchestrator_scale": ("--jobs", "32", "128", "--seconds", "30", "--rounds", "1"),
    "rollout_service": (),
}
MULTITENANT = "multitenant"
HEADERS = ["number", "before", "now", "now / before", "within a tenth"]
_ONE_BY_ONE = Mode("A", strict=True, together=False)
Numbers = dict[str, float]


def output(name: str, words: Sequence[str], tree: Path, path: Path) -> Numbers:
    """Return the numbers that a measurement prints in a tree. path: where its output is kept."""

    def new() -> dict[str, str]:
        command = [python(tree), "-m", "bench", name, *words]
        variables = os.environ | {"PYTHONPATH": python_path(tree)}
        done = subprocess.run(command, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True, check=True)
        return {"output": done.stdout}

    return numbers(kept(path, [name, list(words), str(tree.name)], new)["output"])


def one_by_one(commit: str | None, num_jobs: int, wait_s: float, folder: Path, number: int) -> Numbers:
    """Return the figures of mode A by a commit; None: this tree."""
    setting = RunSetting(folder / (commit or "now"), commit=commit)
    events = figures.load(run(Workload(num_jobs, wait_s, 6), _ONE_BY_ONE, setting, number))
    turns, cpu_s = figures.num_turns(events), figures.cpu_s(events)
    cpu = {f"CPU ms of a turn, {role}": 1000 * seconds / turns for role, seconds in cpu_s.items()}
    rates = {"steps/s": figures.rate_one_by_one(events), "engine busy": figures.busy_share(events)}
    return rates | cpu | {"CPU ms of a turn, all roles": sum(cpu.values())}


def main(words: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(words)
    trees = {chosen.before: worktree(chosen.before), None: ROOT}
    for name in chosen.cases:
        pairs = []
        for number in range(chosen.rounds):
            measured = {
                commit: _measured(name, chosen, number)(commit, trees[commit])
                for commit in (list(trees) if number % 2 == 0 else list(trees)[::-1])
            }
            pairs.append((measured[chosen.before], measured[None]))
        print(f"\n{name} {' '.join(CASES.get(name, ()))}\n\n{table(HEADERS, compared(pairs))}", flush=True)
        if lost := unmatched(pairs):
            print(f"\nnot in all outputs: {'; '.join(lost)}", flush=True)


def _measured(name: str, chosen: argparse.Namespace, number: int) -> Callable[[str | None, Path], Numbers]:
    """Return a function that measures one side: by its commit and tree."""
    if name == MULTITENANT:
        folder = chosen.out / MULTITENANT
        return lambda commit, _: one_by_one(commit, chosen.jobs, chosen.wait, folder, number)
    path = chosen.out / name
    return lambda commit, tree: output(name, CASES[name], tree, path / f"{commit or 'now'}-{number}.json")


def _parser() -> argparse.ArgumentParser:
    parser = options("before", __doc__)
    names = [*CASES, MULTITENANT]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=8, help="of multitenant; default: %(default)s")
    parser.add_argument("--wait", type=float, default=0.4, help="median seconds of its tool; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "before", help="default: %(default)s")
    return parser

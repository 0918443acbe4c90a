"""Growth of every role over 10,000 episodes of the tiny model: of 200 short jobs that come and go, and of 20 long ones.

short: at most 16 jobs of four tenants at once; a job that has made its steps is cancelled, which deletes it, and the next
one is submitted. long: 20 jobs from the begin to the end, with as many episodes in all. So growth by deleted jobs and growth
by episodes are told apart. kept (not by default): all short jobs in one manifest, at most 64 of them admitted at once;
`marlaas run` keeps its finished jobs, so their documents, records and adapters add up.

After 10, 50 and 100 % of the episodes: memory (PSS), open files and threads of each role; messages, bytes, subjects and
consumers of each stream and bucket (`KV_…`, where the marker of a deleted key lives for an hour). Growth is the slope over
the second half, with twice its standard error: what lives is bounded, so it should be nothing. Sandboxes are processes of their
jobs. At the end: files on the bus and in the blob store.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import multitenant_figures as figures
from bench import options
from bench import soak_figures as soaked
from bench.multitenant_runs import RunSetting, run
from bench.multitenant_workload import GROUP_SIZE, GROUPS_PER_STEP, Mode, Workload
from bench.soak_driver import Churn, TimeLimit
from bench.sources import CACHE

STEP_EPISODES = GROUP_SIZE * GROUPS_PER_STEP
MODE = Mode("D", strict=False, together=True)
MEMORY_EVERY_S = 15


def steps_of(num_jobs: int, episodes: int) -> int:
    """Return the steps of each job for so many episodes in all."""
    return -(-episodes // (num_jobs * STEP_EPISODES))


def short(chosen: argparse.Namespace, setting: RunSetting) -> Path:
    workload = Workload(chosen.jobs, 0.0, steps_of(chosen.jobs, chosen.episodes))
    at_once = min(chosen.at_once, chosen.jobs)
    churn = Churn(workload, workload.steps, at_once, TimeLimit(chosen.limit_s), MODE)
    return run(churn.first(), MODE, setting, driver=churn)


def long(chosen: argparse.Namespace, setting: RunSetting) -> Path:
    workload = Workload(chosen.long_jobs, 0.0, steps_of(chosen.long_jobs, chosen.episodes))
    return run(workload, MODE, setting, driver=TimeLimit(chosen.limit_s))


def kept(chosen: argparse.Namespace, setting: RunSetting) -> Path:
    workload = Workload(chosen.jobs, 0.0, steps_of(chosen.jobs, chosen.episodes))
    return run(workload, MODE, setting, driver=TimeLimit(chosen.limit_s))


WORKLOADS: Mapping[str, Callable[[argparse.Namespace, RunSetting], Path]] = {"short": short, "long": long, "kept": kept}


def main(words: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(words)
    found = {}
    for name in chosen.workloads:
        setting = RunSetting(
            chosen.out / name, chosen.slots, reuse=chosen.reuse, memory_every_s=MEMORY_EVERY_S, changes=("monitored",)
        )
        folder = WORKLOADS[name](chosen, setting)
        found[name] = figures.load(folder)
        print(f"\n{report(name, found[name])}\n{left(folder, len(found[name].jobs))}", flush=True)
    if {"short", "long"} <= found.keys():
        episodes_per_job = figures.num_episodes(found["short"]) / len(found["short"].jobs)
        short_ones, long_ones = (soaked.samples(found[name]) for name in ("short", "long"))
        print(f"\n{soaked.apart_table(short_ones, long_ones, episodes_per_job)}")


def report(name: str, events: figures.Events) -> str:
    """Return the tables of a workload."""
    taken = soaked.samples(events)
    head = (
        f"{name}: {figures.num_episodes(events)} episodes of {len(events.jobs)} jobs, {figures.num_steps(events)} steps, "
        f"{figures.rate_together(events):.2f} steps/s, {len(taken)} samples"
    )
    if len(taken) < 2:
        return f"{head}: too few for a table"
    tables = [soaked.memory_table(taken), soaked.handles_table(taken), soaked.streams_table(taken)]
    return "\n\n".join([head, *tables])


def left(folder: Path, num_jobs: int) -> str:
    """Return how many files the bus and the blob store have at the end."""
    lines = []
    for name in ("nats", "blobs"):
        files = [path for path in (folder / "run" / ".state" / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        lines.append(f"{name}: {len(files) / num_jobs:.1f} files, {size / num_jobs / 1024:.0f} KiB a job")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = options("soak", __doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["short", "long"])
    parser.add_argument("--jobs", type=int, default=200, help="short ones; default: %(default)s")
    parser.add_argument("--at-once", type=int, default=16, help="short ones at a time; default: %(default)s")
    parser.add_argument("--long-jobs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--episodes", type=int, default=10_000, help="of a workload; default: %(default)s")
    parser.add_argument("--limit-s", type=float, help="stop each workload after so many seconds. [default: none]")
    parser.add_argument("--slots", type=int, default=16, help="adapter slots of the engine; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "soak", help="default: %(default)s")
    parser.add_argument("--reuse", action="store_true", help="accept kept runs of other sources too")
    return parser

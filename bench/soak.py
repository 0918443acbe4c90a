"""Memory of every role while 200 short jobs of four tenants come and go: 10,000 episodes with the tiny model.

At most 64 jobs are admitted at once; the others wait. Memory (PSS, once in 15 s) is printed at parts of the run, with its
slope over the second half: what lives is bounded, so a role's memory does not grow with the episodes that it has seen.
Sandboxes are processes of their jobs, so their sum follows the number of admitted jobs. Then the files that the run
has left on its bus and in its blob store are counted per job.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import multitenant_figures as figures
from bench import options
from bench.multitenant_runs import CACHE, run
from bench.multitenant_workload import GROUP_SIZE, GROUPS_PER_STEP, Mode, Workload
from bench.runs import table

PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)
ROLES = ("rollout", "trainer", "orchestrator", "nats-server", "runner", "sandbox")
_MODE = Mode("D", strict=False, together=True)


def samples(events: figures.Events) -> list[tuple[float, Mapping[str, int]]]:
    """Return the samples of memory between the first turn and the last step, as part of that time."""
    begin, end = min(job.begin for job in events.jobs.values()), max(job.end for job in events.jobs.values())
    taken = [(line["at"], line["pss_bytes"]) for line in events.usage if "pss_bytes" in line]
    return [((at - begin) / (end - begin), memory) for at, memory in taken if begin <= at <= end]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    below = sum((x - mean_x) ** 2 for x, _ in points)
    return above / below if below else 0.0


def _nearest(points: Sequence[tuple[float, float]], part: float) -> float:
    return min((abs(x - part), y) for x, y in points)[1]


def report(events: figures.Events) -> str:
    taken, episodes = samples(events), figures.num_episodes(events)
    rows = []
    for role in ROLES:
        points = [(part, float(memory.get(role, 0))) for part, memory in taken]
        at = [_nearest(points, part) for part in PARTS]
        per_thousand = slope([point for point in points if point[0] >= 0.5]) / episodes * 1000
        rows.append([role, *(f"{size / 2**20:.0f}" for size in at), f"{per_thousand / 1024:+.0f} KiB"])
    head = ["MiB", *(f"{part:.0%}" for part in PARTS), "per 1,000 episodes in the second half"]
    return table(head, rows)


def main(words: Sequence[str] = ()) -> None:
    parser = options("soak", __doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=16, help="adapter slots of the engine; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "soak", help="default: %(default)s")
    chosen: argparse.Namespace = parser.parse_args(words)
    steps = -(-chosen.episodes // (chosen.jobs * GROUP_SIZE * GROUPS_PER_STEP))
    began = time.monotonic()
    kept = run(Workload(chosen.jobs, 0.0, steps), _MODE, chosen.out, chosen.slots)
    events = figures.load(kept.folder)
    print(f"{figures.num_episodes(events)} episodes of {len(events.jobs)} jobs, {figures.num_steps(events)} steps")
    print(f"{figures.rate_together(events):.2f} steps/s, {time.monotonic() - began:.0f} s in all\n")
    print(report(events))
    state = kept.folder / "run" / ".state"
    for name in ("nats", "blobs"):
        files = [path for path in (state / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{name}: {len(files) / len(events.jobs):.1f} files, {size / len(events.jobs) / 1024:.0f} KiB a job")

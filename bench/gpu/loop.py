"""The whole loop: one job of an example, and several jobs side by side, by wall time, episodes and the share of time in which the trainer computes.

Needs everything that `marlaas run` needs. With `--jobs 1,8,32` the ratios to one job are those of many tenants on one
pool.
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import shapes

EXAMPLES = Path(__file__).parents[2] / "examples"


def main(arguments: Sequence[str] = ()) -> None:
    parser = shapes.options("loop", __doc__)
    parser.add_argument("--example", default="arithmetic.yaml")
    parser.add_argument(
        "--jobs", default="1", help="numbers of jobs that run at once, each a copy of the example's first job"
    )
    parser.add_argument("--steps", type=int, help="default: the example's")
    chosen = parser.parse_args(arguments)
    columns = ("example", "dtype", "jobs", "wall s", "episodes/s", "trainer busy", "last reward")
    shapes.show(columns, _rows(chosen))


def _rows(chosen: argparse.Namespace) -> Iterator[Sequence[Any]]:
    from bench.runs import run

    for count in (int(number) for number in chosen.jobs.split(",")):
        done = run(manifest(EXAMPLES / chosen.example, count, chosen.dtype, chosen.steps))
        records = [record for several in done.records.values() for record in several]
        episodes = sum(record["num_episodes"] for record in records)
        busy = sum(record["metrics"].get("train_s", 0.0) for record in records) / done.wall_s
        reward = [several[-1]["reward_mean"] for several in done.records.values() if several]
        yield (
            chosen.example, chosen.dtype, count, f"{done.wall_s:.0f}", f"{episodes / done.wall_s:.2f}", f"{busy:.2f}",
            f"{sum(reward) / max(1, len(reward)):.2f}",
        )  # fmt: skip


def manifest(example: Path, count: int, dtype: str, steps: int | None) -> list[dict[str, Any]]:
    """Return the example's objects, with its first job repeated `count` times and its pool in `dtype`."""
    import yaml

    objects = [one for one in yaml.safe_load_all(example.read_text()) if one]
    job = next(one for one in objects if one["kind"] == "RLJob")
    others = [one for one in objects if one["kind"] != "RLJob"]
    for pool in (one for one in others if one["kind"] == "ModelPool"):
        pool["spec"].setdefault("rollout", {})["dtype"] = dtype
        pool["spec"]["adapterSlots"] = max(count, pool["spec"].get("adapterSlots", 0))
    copies = []
    for number in range(count):
        one = copy.deepcopy(job)
        one["metadata"]["name"] = f"{job['metadata']['name']}-{number}"
        if steps is not None:
            one["spec"].setdefault("training", {})["steps"] = steps
        copies.append(one)
    return [*others, *copies]

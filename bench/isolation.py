"""Nobody else's adapter: 32 jobs of four tenants on 6 slots of two real engines, versions that change and page; every recorded turn is scored again.

Every version of every job is a random adapter of its own, so large that it can be recognised: the mean difference
between the logprobs that the engine recorded for a turn and those of PEFT under the claimed version is rounding, and
under any other adapter it is many times larger (a sample of turns is also scored under another one). Requests come at
random; a third of the groups is pinned to an older version. Prints the number of turns, how often versions were
loaded and loaded again after an eviction, the differences, and every turn that is not its version's. Exit code 1 if
there is one, or if no version was loaded again.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench import options
from bench.rollout_engine import base_model
from bench.rollout_pool import Bench, Served, served
from bench.runs import table
from marlaas_api import subjects, wire
from marlaas_api.messages import Pin, Turn

JOBS, TENANTS, SLOTS, VERSIONS, GROUP = 32, 4, 6, 3, 4
SIZE = 0.3
CLIENTS, TOKENS = 48, 8
TOLERANCE = 1e-3
"""Largest mean difference of a turn's logprobs (float32) that counts as rounding."""
RECOGNISED = 0.99
"""Least share of turns that another adapter gives other logprobs: a reply of one token may agree by chance."""
SAMPLE = 400
_BATCH, _MOST_PRINTED = 256, 20


@dataclass(frozen=True, slots=True)
class GroupVersions:
    """Versions that the turns of a group may have.

    Attributes:
        first, last: the job's newest version when the group was requested, and when its last turn had ended.
        pinned: the version of its pin; None: it has none.
    """

    first: int
    last: int
    pinned: int | None = None


@dataclass
class Load:
    """Requests of all jobs. newest: by job, the last committed version. groups: those whose turns have ended."""

    bench: Bench
    draw: random.Random
    num_requests: int
    newest: list[int] = field(default_factory=lambda: [1] * JOBS)
    groups: dict[str, GroupVersions] = field(default_factory=dict)
    num_done: int = 0
    progressed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self) -> None:
        """Request all turns, from many clients at once, while versions are committed."""
        commits = asyncio.create_task(self._commit())
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))
        await commits

    async def _client(self) -> None:
        while self.num_done < self.num_requests:
            number = self.draw.randrange(JOBS)
            job, index = self.bench.jobs[number], next(self.bench.indices)
            requests = [self.bench.request(job, index, member, TOKENS) for member in range(GROUP)]
            group, first, pinned = requests[0].group, self.newest[number], None
            if self.draw.random() < 1 / 3:
                pinned = self.draw.randint(max(1, first - 1), first)
                key = subjects.pin_key(job.namespace, job.job, "policy", group)
                await self.bench.put(subjects.PINS, key, Pin(version=pinned))
            async with self.progressed:
                self.num_done += GROUP
                self.progressed.notify_all()
            await asyncio.gather(*(self.bench.client.ask(request) for request in requests))
            self.groups[group] = GroupVersions(first, self.newest[number], pinned)

    async def _commit(self) -> None:
        """Commit the jobs' later versions in random order, spread over the requests."""
        order = [number for number in range(JOBS) for _ in range(VERSIONS - 1)]
        self.draw.shuffle(order)
        for done, number in enumerate(order):
            async with self.progressed:
                due = self.num_requests * (done + 1) / (len(order) + 1)
                await self.progressed.wait_for(partial(self._has, due))
            job, version = self.bench.jobs[number], self.newest[number] + 1
            ref = await self.bench.publish(job, version, self.bench.manifests[adapter_of(number, version)])
            await self.bench.commit(job, version, ref)
            self.newest[number] = version

    def _has(self, due: float) -> bool:
        return self.num_done >= due


def adapter_of(number: int, version: int) -> int:
    """Return the number of the adapter that a version of a job has."""
    return (version - 1) * JOBS + number


class Scorer:
    """Logprobs by transformers and PEFT, one adapter at a time."""

    def __init__(self, model: Path) -> None:
        self._base = base_model(model)

    def differences(self, adapter: Path, turns: Sequence[Turn]) -> list[float]:
        """Return each turn's mean difference between the recorded logprobs and those under an adapter.

        turns: first turns of their episodes.
        """
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(self._base, str(adapter)).eval()
        try:
            return [one for at in range(0, len(turns), _BATCH) for one in _scored(adapted, turns[at : at + _BATCH])]
        finally:
            adapted.unload()

    def differences_under(self, adapter_of_turn: Callable[[Turn], Path], turns: Sequence[Turn]) -> list[float]:
        """Return the same under an adapter of each turn's own, in the order of the turns."""
        places: dict[Path, list[int]] = defaultdict(list)
        for at, turn in enumerate(turns):
            places[adapter_of_turn(turn)].append(at)
        found = [0.0] * len(turns)
        for adapter, some in places.items():
            for at, gap in zip(some, self.differences(adapter, [turns[one] for one in some]), strict=True):
                found[at] = gap
        return found


@torch.inference_mode()
def _scored(model: Any, turns: Sequence[Turn]) -> list[float]:
    rows = [
        (wire.unpack_ids(turn.prompt_ids).tolist(), wire.unpack_ids(turn.output_ids).tolist(), turn) for turn in turns
    ]
    longest = max(len(prompt) + len(output) for prompt, output, _ in rows)
    ids = torch.tensor([prompt + output + [0] * (longest - len(prompt) - len(output)) for prompt, output, _ in rows])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    logprobs = logprobs.gather(2, ids[:, 1:, None])[..., 0]  # causal: the padding on the right changes nothing
    found = []
    for row, (prompt, output, turn) in zip(logprobs, rows, strict=True):
        own = row[len(prompt) - 1 : len(prompt) + len(output) - 1]
        recorded = torch.tensor(wire.unpack_logprobs(turn.logprobs).tolist())
        found.append(float((own - recorded).abs().mean()))
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """Turns of a run, each scored under its claimed version, and some under another adapter.

    Attributes:
        gaps: mean difference of each turn's logprobs under its claimed version.
        other_gaps: those of a sample of turns under another adapter.
        num_loads, num_reloads: loads of versions, and those of versions that had served before and were evicted.
    """

    turns: Sequence[Turn]
    groups: Mapping[str, GroupVersions]
    gaps: Sequence[float]
    other_gaps: Sequence[float]
    num_requests: int
    num_loads: int
    num_reloads: int
    seconds: float


def foreign(result: Result) -> list[str]:
    """Return the episodes whose turn is not of the adapter of its claimed version."""
    return [turn.episode for turn, gap in zip(result.turns, result.gaps, strict=True) if not gap <= TOLERANCE]


def not_requested(result: Result) -> list[str]:
    """Return the episodes whose turn has another version than its group's pin or other turns, or one not committed yet."""
    of_group = {turn.group: turn.version for turn in result.turns}
    found = []
    for turn in result.turns:
        group = result.groups[turn.group]
        wanted = of_group[turn.group] if group.pinned is None else group.pinned
        if turn.version != wanted or turn.version > group.last:
            found.append(turn.episode)
    return found


def failures(result: Result) -> list[str]:
    """Return a sentence for each promise that the measured turns do not keep."""
    wrong = {"of another adapter": foreign(result), "of a version that was not requested": not_requested(result)}
    found = [f"{len(names)} turns {what}: {', '.join(names[:_MOST_PRINTED])}" for what, names in wrong.items() if names]
    if len(result.turns) < result.num_requests:
        found.append(f"{len(result.turns)} of {result.num_requests} turns are on record")
    if not result.num_reloads:
        found.append("no version was loaded again after an eviction: the versions did not page")
    if sum(gap > TOLERANCE for gap in result.other_gaps) < RECOGNISED * len(result.other_gaps):
        found.append("another adapter gives the same logprobs: a wrong one would not be recognised")
    return found


def report(result: Result) -> str:
    """Return the table of figures."""
    free = [turn for turn in result.turns if result.groups[turn.group].pinned is None]
    older = sum(turn.version < result.groups[turn.group].first for turn in free)
    by_replica = Counter(turn.replica for turn in result.turns)
    rows: list[list[Any]] = [
        ["turns", len(result.turns)],
        ["turns a second", f"{len(result.turns) / result.seconds:.0f}"],
        ["tenants", len({turn.namespace for turn in result.turns})],
        ["adapters (versions of jobs)", len({(turn.uid, turn.version) for turn in result.turns})],
        ["loads / of evicted versions", f"{result.num_loads} / {result.num_reloads}"],
        ["engines", ", ".join(f"{name}: {number}" for name, number in sorted(by_replica.items()))],
        ["turns of pinned groups", len(result.turns) - len(free)],
        ["others of the version before the newest, which was not proven yet", older],
        ["difference under the claimed version, mean / worst", f"{fmean(result.gaps):.1e} / {max(result.gaps):.1e}"],
        [
            "difference under another adapter, mean / least",
            f"{fmean(result.other_gaps):.1e} / {min(result.other_gaps):.1e}",
        ],
        ["turns of another adapter", len(foreign(result))],
        ["turns of a version that was not requested", len(not_requested(result))],
    ]
    return table(["", ""], rows)


async def measure(chosen: argparse.Namespace, folder: Path) -> Result:
    wanted = Served(
        jobs=JOBS, tenants=TENANTS, slots=SLOTS, replicas=chosen.replicas, adapters=JOBS * VERSIONS, size=SIZE
    )
    async with served(folder, wanted) as bench:
        load, began = Load(bench, random.Random(chosen.seed), chosen.requests), time.monotonic()
        await load.run()
        seconds = time.monotonic() - began
        loads = [int(bench.metric(f"marlaas_rollout_{name}_total")) for name in ("loads", "reloads")]
        stored = await bench.bus.replay(subjects.TURNS, subjects.turn("*", "*", "*", "*"))
    turns = [wire.decode_as(Turn, one.data) for one in stored]
    numbers = {job.uid: number for number, job in enumerate(bench.jobs)}
    scorer = Scorer(folder / "model")

    def own(turn: Turn) -> int:
        return adapter_of(numbers[turn.uid], turn.version)

    def other(turn: Turn) -> Path:
        return folder / f"a{(own(turn) + chance.randrange(1, JOBS * VERSIONS)) % (JOBS * VERSIONS)}"

    chance = random.Random(chosen.seed)
    sample = chance.sample(turns, min(SAMPLE, len(turns)))
    return Result(
        turns=turns,
        groups=load.groups,
        gaps=scorer.differences_under(lambda turn: folder / f"a{own(turn)}", turns),
        other_gaps=scorer.differences_under(other, sample),
        num_requests=chosen.requests,
        num_loads=loads[0],
        num_reloads=loads[1],
        seconds=seconds,
    )


def main(words: Sequence[str] = ()) -> None:
    parser = options("isolation", __doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=2, help="engines; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(chosen, Path(folder)))
    print(report(result), flush=True)
    if failed := failures(result):
        sys.exit("\n".join(failed))

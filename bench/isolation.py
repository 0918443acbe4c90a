"""Nobody else's adapter: 32 jobs on 6 slots of two real engines, versions that change and page; every recorded turn is scored again.

Every version of every job is a random adapter of its own, so large that it can be recognised: the mean difference
between the logprobs that the engine recorded for a turn and those of PEFT under the claimed version is rounding, and
under any other adapter it is many times larger (a sample of turns is also scored under another one). Requests come at
random; a third of the groups is pinned to an older version. Prints the number of turns, how often versions were
loaded, the differences, and every turn that is not its version's. Exit code 1 if there is one.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import options
from bench.rollout_engine import base_model
from bench.rollout_pool import Bench, Served, served
from bench.runs import table
from marlaas_api import subjects, wire
from marlaas_api.messages import Pin, Turn

JOBS, SLOTS, VERSIONS, GROUP = 32, 6, 3, 4
SIZE = 0.3
CLIENTS, TOKENS = 48, 8
TOLERANCE = 1e-3
"""Largest mean difference of a turn's logprobs (float32) that counts as rounding."""
SAMPLE = 400
_BATCH = 256


@dataclass
class Load:
    """Requests of all jobs. newest: by job, the last committed version. pinned: by group, the version of its pin."""

    bench: Bench
    draw: random.Random
    num_requests: int
    newest: list[int] = field(default_factory=lambda: [1] * JOBS)
    pinned: dict[str, int] = field(default_factory=dict)
    allowed: dict[str, tuple[int, int]] = field(default_factory=dict)
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
            group, first = requests[0].group, self.newest[number]
            if self.draw.random() < 1 / 3:
                version = self.pinned[group] = self.draw.randint(max(1, first - 1), first)
                key = subjects.pin_key(job.namespace, job.job, "policy", group)
                await self.bench.put(subjects.PINS, key, Pin(version=version))
            async with self.progressed:
                self.num_done += GROUP
                self.progressed.notify_all()
            await asyncio.gather(*(self.bench.client.ask(request) for request in requests))
            self.allowed[group] = (first, self.newest[number])

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

    def __init__(self, folder: Path) -> None:
        self._folder, self._base = folder, base_model(folder / "model")

    def differences(self, adapter: int, turns: Sequence[Turn]) -> list[float]:
        """Return each turn's mean difference between the recorded logprobs and those under an adapter."""
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(self._base, str(self._folder / f"a{adapter}")).eval()
        found = [one for at in range(0, len(turns), _BATCH) for one in _scored(adapted, turns[at : at + _BATCH])]
        adapted.unload()
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


def wrong_version(load: Load, turn: Turn, of_group: int) -> bool:
    """Return whether a turn's version is not its group's pin, not that of the group's other turns, or not committed yet."""
    _, last = load.allowed[turn.group]
    return turn.version != load.pinned.get(turn.group, of_group) or turn.version != of_group or turn.version > last


async def measure(chosen: argparse.Namespace, folder: Path) -> int:
    wanted = Served(jobs=JOBS, slots=SLOTS, replicas=chosen.replicas, adapters=JOBS * VERSIONS, size=SIZE)
    async with served(folder, wanted) as bench:
        load, began = Load(bench, random.Random(chosen.seed), chosen.requests), time.monotonic()
        await load.run()
        seconds = time.monotonic() - began
        stored = [wire.decode_as(Turn, one.data) for one in await bench.bus.replay(subjects.TURNS, "turn.bench.>")]
    return report(load, stored, seconds, Scorer(folder))


def report(load: Load, turns: Sequence[Turn], seconds: float, scorer: Scorer) -> int:
    """Print the figures; return 1 if a turn is not its version's."""
    by_adapter: dict[int, list[Turn]] = defaultdict(list)
    numbers = {job.job: number for number, job in enumerate(load.bench.jobs)}
    for turn in turns:
        by_adapter[adapter_of(numbers[turn.job], turn.version)].append(turn)
    own = {turn.episode: gap for adapter, some in by_adapter.items() for turn, gap in _paired(scorer, adapter, some)}
    sample = load.draw.sample(list(turns), min(SAMPLE, len(turns)))
    others: list[float] = []
    for adapter in range(JOBS * VERSIONS):
        some = [one for at, one in enumerate(sample) if at % (JOBS * VERSIONS) == adapter]
        some = [one for one in some if adapter_of(numbers[one.job], one.version) != adapter]
        others += scorer.differences(adapter, some) if some else []
    foreign = [name for name, gap in own.items() if gap > TOLERANCE]
    of_group = {turn.group: turn.version for turn in turns}
    wrong = [turn.episode for turn in turns if wrong_version(load, turn, of_group[turn.group])]
    free = [turn for turn in turns if turn.group not in load.pinned]
    older = sum(turn.version < load.allowed[turn.group][0] for turn in free)
    replicas = sorted({turn.replica for turn in turns})
    rows: list[list[Any]] = [
        ["turns", len(turns)],
        ["turns a second", f"{len(turns) / seconds:.0f}"],
        ["adapters (versions of jobs)", len(by_adapter)],
        ["engines", ", ".join(f"{name}: {sum(turn.replica == name for turn in turns)}" for name in replicas)],
        ["turns of pinned groups", len(turns) - len(free)],
        ["others of the version before the newest, which was not proven yet", older],
        [
            "difference under the claimed version, mean / worst",
            f"{_mean(list(own.values())):.1e} / {max(own.values()):.1e}",
        ],
        ["difference under another adapter, mean / least", f"{_mean(others):.1e} / {min(others):.1e}"],
        ["turns of another adapter", len(foreign)],
        ["turns of a version that was not asked for", len(wrong)],
    ]
    print(table(["", ""], rows))
    for name in [*foreign, *wrong][:20]:
        print(name)
    return int(bool(foreign or wrong) or len(turns) < load.num_requests)


def _paired(scorer: Scorer, adapter: int, turns: list[Turn]) -> list[tuple[Turn, float]]:
    return list(zip(turns, scorer.differences(adapter, turns), strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(words: Sequence[str] = ()) -> None:
    parser = options("isolation", __doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=2, help="engines; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        if asyncio.run(measure(chosen, Path(folder))):
            sys.exit("a turn is not its version's")

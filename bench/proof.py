"""Error rates of delivery's proof: good versions refused, wrong ones accepted.

`--model tiny|smollm2 --dtype float32|bfloat16 --versions N --wrong N`.

Good versions: versions of four agents, trained by AdamW on random advantages of text that the model generates, at
learning rates 1e-6 to 1e-3. Wrong versions come in two kinds: the slot holds another adapter than the manifest's,
with a forged file sha256; or the engine applies correct slots wrongly, or has another base model
(`bench/proof_faults.py`). Each is counted by the part of the proof that detected it.
"""

import argparse
import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.proof_versions import OTHER_BASE, RANK, RATES, Publisher, Version, changed, write_other_base
from bench.runs import table
from marlaas.models import prepare
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import Manifest, PoolDocument
from marlaas_worker.adapters import DTYPES
from marlaas_worker.calibration import fingerprint
from marlaas_worker.rollout import vllm_incarnation
from marlaas_worker.rollout.engine import LoadedAdapter
from marlaas_worker.rollout.proof import ProofFailed, load_proven
from marlaas_worker.rollout.self_test import EngineSelfTest, SelfTestFailed
from marlaas_worker.rollout.vllm_engine import VllmEngine
from marlaas_worker.rollout.vllm_settings import engine_arguments

MODELS = {"tiny": "tiny", "smollm2": "smollm2-135m-instruct"}
SLOTS = 8


class ProofBench:
    """An engine, and the proofs tried on it."""

    def __init__(self, engine: VllmEngine, publisher: Publisher, folder: Path) -> None:
        self.engine, self.publisher, self._folder = engine, publisher, folder
        self.slot_numbers = itertools.count(1)
        self.gaps: dict[float, list[tuple[float, float]]] = {rate: [] for rate in RATES}
        self.refusals: list[str] = []
        self.caught: dict[str, Counter[str]] = {}

    async def self_test(self, base: str = "") -> str:
        """Return the part of the self-test that failed; empty if it passed."""
        test = EngineSelfTest(self.publisher.calibration, self._folder / "self-test", self.slot_numbers)
        try:
            await test.run(self.engine)
        except SelfTestFailed:
            return "self-test"
        return ""

    async def prove(self, manifest: Manifest, folder: Path) -> float:
        adapter = LoadedAdapter(manifest.adapter.engine_name, next(self.slot_numbers), folder)
        proof = await load_proven(self.engine, manifest, adapter)
        await self.engine.unload(adapter)
        return proof.probe_gap

    async def good(self, versions: Sequence[Version]) -> None:
        """Prove versions, as many at once as there are slots."""
        found = await asyncio.gather(
            *(self.prove(one.manifest, one.folder) for one in versions), return_exceptions=True
        )
        for version, gap in zip(versions, found, strict=True):
            if isinstance(gap, ProofFailed):
                self.refusals.append(str(gap))
            elif isinstance(gap, BaseException):
                raise gap
            else:
                self.gaps[version.rate].append((gap, gap / version.manifest.probe_tolerance))

    async def wrong(self, kind: str, published: Version, held: Version) -> None:
        """Put `held` into the slot of `published`, with forged file digests.

        Records which part of the proof detects it, and whether the probes alone would.
        """
        for name, digests in (
            (kind, published.manifest.tensor_digests),
            (f"{kind}: probes alone", held.manifest.tensor_digests),
        ):
            forged = published.manifest.model_copy(update={"files": held.manifest.files, "tensor_digests": digests})
            try:
                await self.prove(forged, held.folder)
                part = "nothing"
            except ProofFailed as error:
                part = error.check.value
            self.caught.setdefault(name, Counter())[part] += 1

    async def faulty(self, kind: str, switch: Callable[[], Any]) -> None:
        await switch()
        self.caught.setdefault(kind, Counter())[await self.self_test() or "nothing"] += 1

    def other_base(self, seed: int) -> None:
        """Test whether an engine with another base model's files accepts the calibration as its own.

        All matrices of the other model differ slightly.
        """
        folder = self._folder / "other-base"
        write_other_base(Path(self.publisher.path), folder, seed)
        found = "nothing" if fingerprint(folder) == self.publisher.calibration.base else "fingerprint"
        self.caught.setdefault("engine has another base model", Counter())[found] += 1
        shutil.rmtree(folder)

    async def call_worker(self, method: str, *arguments: Any) -> None:
        """Switch a fault in the engine's worker."""
        assert self.engine._incarnation is not None
        await self.engine._incarnation.llm.collective_rpc(method, args=arguments)


@asynccontextmanager
async def started(pool: PoolDocument, scratch: Path) -> AsyncIterator[VllmEngine]:
    """Start an engine whose worker can be made faulty."""

    def faulty(*arguments: Any) -> dict[str, Any]:
        return {**engine_arguments(*arguments), "worker_extension_cls": "bench.proof_faults.FaultySlots"}

    vars(vllm_incarnation)["engine_arguments"] = faulty
    engine = VllmEngine(Path(pool.model_path), pool.spec, frozenset(), scratch / "vllm")
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def measure(options: argparse.Namespace, scratch: Path) -> None:
    path = str(prepare(MODELS[options.model]))
    rollout = {"dtype": options.dtype, "maxNumSeqs": 64, "kvCacheBytes": "256Mi", "maxModelLen": 128}
    spec = {"model": {"path": path}, "adapterSlots": options.slots, "maxRank": RANK, "rollout": rollout}
    pool = PoolDocument(name="bench", model_path=path, spec=pool_spec(ModelPoolSpec.model_validate(spec)))
    publisher = await asyncio.to_thread(Publisher, pool, options.dtype, scratch / "published")
    calibration = publisher.calibration
    print(
        f"{options.model} {options.dtype}: noise {calibration.noise:.2e}, tolerance {calibration.tolerance:.2e}, under the self-test's adapter "
        f"{calibration.self_test.tolerance:.2e}; calibrated in {publisher.calibrate_s:.1f} s",
        flush=True,
    )
    async with started(pool, scratch) as engine:
        bench = ProofBench(engine, publisher, scratch)
        began = time.perf_counter()
        failed = await bench.self_test()
        print(
            f"self-test of {options.slots} slots: {failed or 'passed'} in {time.perf_counter() - began:.2f} s",
            flush=True,
        )
        kept = await good(bench, options)
        report_good(bench)
        await wrong(bench, kept, options.wrong)
    print(table(["what is wrong", "tried", "found by"], [_row(kind, parts) for kind, parts in bench.caught.items()]))


async def good(bench: ProofBench, options: argparse.Namespace) -> list[list[Version]]:
    """Prove all versions; keep each agent's last versions for the later tests, and delete the files of the others."""
    chains = [bench.publisher.chain(number, -(-options.versions // len(RATES))) for number in range(len(RATES))]
    kept: list[list[Version]] = []
    for chain in chains:
        last: list[Version] = []
        while versions := await asyncio.to_thread(_take, chain, options.slots):
            await bench.good(versions)
            report_so_far(bench)
            last = [*last, *versions]
            for version in last[:-30]:
                for file in version.folder.iterdir():
                    file.unlink()
            last = last[-30:]
        kept.append(last)
    return kept


def report_so_far(bench: ProofBench) -> None:
    """Print a line after each batch: all versions take from minutes to more than an hour."""
    shares = [share for gaps in bench.gaps.values() for _, share in gaps]
    worst = f"{max(shares):.2f} of the tolerance" if shares else "none"
    print(f"  {len(shares)} versions proven, {len(bench.refusals)} refused; worst gap: {worst}", flush=True)


async def wrong(bench: ProofBench, kept: list[list[Version]], num: int) -> None:
    """Try every kind of wrong version, `num` times each."""
    pairs = [pair for chain in kept for pair in itertools.pairwise(chain)]
    others = list(zip(kept[1], kept[2], strict=False))
    for number in range(num):
        before, published = pairs[number % len(pairs)]
        await bench.wrong("slot holds the version before", published, before)
        await bench.wrong("slot holds another agent's adapter", *others[number % len(others)])
        for change in ("scaled", "layer"):
            name = "slot holds the adapter scaled by 2" if change == "scaled" else "slot lacks one layer"
            await bench.wrong(name, published, changed(bench.publisher, published, change, number))
        for kind, fault in (
            ("engine applies no adapter", "unapplied"),
            ("engine applies one slot as nothing", "one slot"),
            ("engine applies adapters twice", "doubled"),
            ("engine skips one layer's adapter", "one layer"),
        ):
            slot_or_layer = number % bench.engine.limits.slots if fault == "one slot" else number
            await bench.faulty(kind, partial(bench.call_worker, "bench_fault", fault, slot_or_layer))
        await bench.call_worker("bench_fault", "none", 0)
        bench.other_base(number)
        for size in (OTHER_BASE, 5 * OTHER_BASE):
            name = f"engine's base model is changed in memory by {size:.0%}: self-test alone"
            await bench.faulty(name, partial(bench.call_worker, "bench_base", number, size))
        await bench.call_worker("bench_base", 0, 0.0)
    print(f"the right engine again: {await bench.self_test() or 'passed'}", flush=True)


def _take(chain: Iterator[Version], num: int) -> list[Version]:
    return list(itertools.islice(chain, num))


def report_good(bench: ProofBench) -> None:
    rows = []
    for rate, found in bench.gaps.items():
        gaps, shares = [gap for gap, _ in found], [share for _, share in found]
        if found:
            rows.append(
                [f"{rate:.0e}", len(gaps), f"{statistics.mean(gaps):.2e}", f"{max(gaps):.2e}", f"{max(shares):.2f}"]
            )
    print(table(["learning rate", "versions", "mean gap", "worst gap", "largest share of its tolerance"], rows))
    print(f"refused: {len(bench.refusals)} {bench.refusals[:2]}", flush=True)


def _row(kind: str, parts: Counter[str]) -> list[Any]:
    return [kind, sum(parts.values()), ", ".join(f"{part} {count}" for part, count in parts.most_common())]


def main(words: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench proof", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--wrong", type=int, default=100)
    parser.add_argument("--slots", type=int, default=SLOTS)
    with tempfile.TemporaryDirectory(prefix="marlaas-proof-") as scratch:
        asyncio.run(measure(parser.parse_args(list(words)), Path(scratch)))


if __name__ == "__main__":
    main()

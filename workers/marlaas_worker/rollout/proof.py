"""Proof of delivery: a version serves only once the engine was shown to hold exactly what the trainer published (DESIGN, "Identity and commits").

Four checks, in this order: the manifest is of this version; the files have its sha256; the engine's own slot has its digest; the engine's
logprobs agree with the trainer's on the probes, within the tolerance that the trainer has measured for this base model and dtype. Probes come last
because they alone cannot tell neighbouring versions apart, and because scoring fills the engine's prefix cache, which nothing wrong may ever reach.

That slots are applied at all is shown before, by the engine's self-test. Versions whose bytes are equal once rounded to the engine's dtype are as good as
any others: a digest is compared with its own version's, never with another's.
"""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_worker.adapters import AdapterInvalid, read_adapter
from marlaas_worker.calibration import ids_of, joined, mean_gap
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed, PromptInvalid
from marlaas_worker.rollout.self_test import together


class Check(StrEnum):
    """What was checked."""

    IDENTITY = "identity"
    FILES = "files"
    DIGEST = "digest"
    PROBES = "probes"


class ProofFailed(Permanent):
    """The engine does not hold the version that it should. `check` says what showed it; the text has the numbers."""

    def __init__(self, name: str, check: Check, text: str) -> None:
        super().__init__(f"{name} is not served, its {check} check failed: {text}")
        self.check = check


@dataclass(frozen=True, slots=True)
class Proof:
    """What a proven version showed: mean absolute difference of logprobs on the probes; seconds by phase."""

    digest: str
    probe_gap: float
    load_s: float
    digest_s: float
    probe_s: float


async def load_proven(engine: Engine, manifest: Manifest, adapter: LoadedAdapter) -> Proof:
    """Load a version whose files lie in `adapter.folder`, and prove it; the slot is freed again if that fails.

    Raises ProofFailed, LoadFailed, EngineDown.
    """
    name = manifest.adapter.engine_name
    if adapter.name != name:
        raise ProofFailed(adapter.name, Check.IDENTITY, f"the manifest is of {name}")
    await asyncio.to_thread(_check_files, manifest, adapter)
    began = time.perf_counter()
    try:
        await engine.load(adapter)
        loaded = time.perf_counter()
        digest = await _check_digest(engine, manifest, adapter)
        digested = time.perf_counter()
        gap = await _check_probes(engine, manifest, adapter)
    except LoadFailed:
        raise  # then the slot is free
    except BaseException:
        await _unload(engine, adapter)
        raise
    return Proof(digest, gap, loaded - began, digested - loaded, time.perf_counter() - digested)


async def _unload(engine: Engine, adapter: LoadedAdapter) -> None:
    with contextlib.suppress(EngineDown):
        await asyncio.shield(engine.unload(adapter))


def _check_files(manifest: Manifest, adapter: LoadedAdapter) -> None:
    for filename, ref in manifest.files.items():
        try:
            found = hashlib.sha256((adapter.folder / filename).read_bytes()).hexdigest()
        except OSError as error:
            raise ProofFailed(adapter.name, Check.FILES, f"{filename} cannot be read: {error}") from error
        if found != ref.sha256:
            raise ProofFailed(adapter.name, Check.FILES, f"{filename} has sha256 {found}, published was {ref.sha256}")
    try:
        read_adapter(adapter.folder)
    except AdapterInvalid as error:
        raise ProofFailed(adapter.name, Check.FILES, str(error)) from error


async def _check_digest(engine: Engine, manifest: Manifest, adapter: LoadedAdapter) -> str:
    dtype = engine.limits.dtype
    published = manifest.tensor_digests.get(dtype)
    try:
        held = await engine.digest(adapter)
    except LoadFailed as error:
        raise ProofFailed(adapter.name, Check.DIGEST, str(error)) from error
    if held != published:
        text = f"the engine's slot {adapter.slot_id} has {held}, published for {dtype} was {published}"
        raise ProofFailed(adapter.name, Check.DIGEST, text)
    return held


async def _check_probes(engine: Engine, manifest: Manifest, adapter: LoadedAdapter) -> float:
    if not manifest.probes:
        raise ProofFailed(adapter.name, Check.PROBES, "the manifest has none")
    try:
        scores = np.concatenate(await together([engine.score(adapter, ids) for ids in ids_of(manifest.probes)]))
    except PromptInvalid as error:
        raise ProofFailed(adapter.name, Check.PROBES, str(error)) from error
    gap, bound = mean_gap(scores, joined([probe.logprobs for probe in manifest.probes])), manifest.probe_tolerance
    if not gap <= bound:
        text = (
            f"mean |difference of logprobs| {gap:.2e} over {len(scores)} tokens, at most {bound:.2e} is noise "
            f"of this base model in {engine.limits.dtype}"
        )
        raise ProofFailed(adapter.name, Check.PROBES, text)
    return gap

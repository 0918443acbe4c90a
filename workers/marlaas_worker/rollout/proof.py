"""Proof of delivery: a version serves only once the engine was shown to hold exactly what the trainer published (DESIGN, "Identity and commits").

Four checks, in this order: the manifest is of this version; the files have its sha256; the engine's own slot has its digest; the engine's
logprobs agree with the trainer's on the probes. Probes come last because they alone cannot tell neighbouring versions apart, and because
scoring fills the engine's prefix cache, which nothing wrong may ever reach.
"""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from marlaas_api.arrays import unpack_ids, unpack_logprobs
from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_worker.adapters import AdapterInvalid, has_effect, read_adapter
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed, PromptInvalid

# Mean absolute difference of logprobs that is noise: ten times what bench/rollout_engine.py measures between this
# engine and a trainer in the same dtype (float32 1e-6 to 1e-5 on the models at hand, bfloat16 3e-3, float16 4e-4), no less than 1e-3.
PROBE_TOLERANCE = {"float32": 1e-3, "float16": 5e-3, "bfloat16": 3e-2}


class Check(StrEnum):
    """What was checked."""

    IDENTITY = "identity"
    FILES = "files"
    EFFECT = "effect"
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
        tensors, _ = read_adapter(adapter.folder)
    except AdapterInvalid as error:
        raise ProofFailed(adapter.name, Check.FILES, str(error)) from error
    if manifest.version > 0 and not has_effect(tensors):
        raise ProofFailed(adapter.name, Check.EFFECT, "every B is zero, which only version 0 may be")


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
    probes = [unpack_ids(probe.ids) for probe in manifest.probes]
    outcomes = await asyncio.gather(*(engine.score(adapter, ids) for ids in probes), return_exceptions=True)
    scores = [_score_of(adapter, outcome) for outcome in outcomes]
    expected = np.concatenate([unpack_logprobs(probe.logprobs) for probe in manifest.probes])
    difference = np.abs(np.concatenate(scores) - expected)
    gap, bound = float(difference.mean()), PROBE_TOLERANCE[engine.limits.dtype]
    if not gap <= bound:
        text = f"mean |difference of logprobs| {gap:.2e} over {len(difference)} tokens, at most {bound:.0e} is noise"
        raise ProofFailed(adapter.name, Check.PROBES, text)
    return gap


def _score_of(adapter: LoadedAdapter, outcome: npt.NDArray[np.float32] | BaseException) -> npt.NDArray[np.float32]:
    if isinstance(outcome, PromptInvalid):
        raise ProofFailed(adapter.name, Check.PROBES, str(outcome)) from outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome

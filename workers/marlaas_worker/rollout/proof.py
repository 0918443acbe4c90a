"""Proof of delivery: a version is served only after checks that the engine holds what the trainer published.

There are four checks, in this order:
- The manifest is of this version.
- The files have the manifest's sha256.
- The tensors read back from the engine's slot have the published digest.
- The engine's logprobs on the probes match the trainer's, within the tolerance that the trainer has measured
  for this base model and dtype.

The probes come last for two reasons: they alone cannot distinguish neighbouring versions, and scoring fills the
engine's prefix cache, which must never contain results of a wrong adapter.

A version that was evicted and is loaded again in the same incarnation of the engine is not probed again.

The engine's self-test has shown before that the engine applies the adapters in its slots. A slot's digest is compared only with the
published one of the same version, so two versions may be equal once rounded to the engine's dtype. See
docs/explanation/proof-of-delivery.md.
"""

import asyncio
import contextlib
import hashlib
import math
import time
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from marlaas_api.background import await_all
from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_worker.adapters import AdapterInvalid, read_adapter
from marlaas_worker.calibration import ids_of, joined, mean_gap
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed, PromptInvalid


class Check(StrEnum):
    """The checks that a version has to pass before it is served (`load_proven`), in this order.

    IDENTITY: the manifest is of this version. FILES: the files have the manifest's sha256, and are a valid adapter. DIGEST: the tensors
    in the engine's slot have the published digest. PROBES: the engine's logprobs match the trainer's.
    """

    IDENTITY = "identity"
    FILES = "files"
    DIGEST = "digest"
    PROBES = "probes"


class ProofFailed(Permanent):
    """The engine does not hold the expected version.

    name: the version's engine name. check: the check that failed. text: the values that were found and expected.
    """

    def __init__(self, name: str, check: Check, text: str) -> None:
        super().__init__(f"{name} is not served, its {check} check failed: {text}")
        self.check = check


@dataclass(frozen=True, slots=True)
class Proof:
    """Results of a passed proof.

    Attributes:
        digest: of the tensors in the slot.
        probe_gap: mean |difference| between the engine's and the trainer's logprobs on the probes; 0 without probes.
        load_s: seconds for the load and the digest.
        probe_s: seconds for the probes; 0 without probes.
    """

    digest: str
    probe_gap: float
    load_s: float
    probe_s: float


async def load_proven(engine: Engine, manifest: Manifest, adapter: LoadedAdapter, *, probes: bool = True) -> Proof:
    """Load a version from `adapter.folder` into the engine, and run all checks (`Check`). After any failure, its slot is free again.

    Args:
        manifest: of the version.
        adapter: the version's engine name, slot number and folder.
        probes: False leaves out the probes, for a version that passed them earlier in the same incarnation of the engine; the digest then
            shows that the slot holds the same tensors again.

    Raises ProofFailed, LoadFailed, EngineDown, and OSError if this machine cannot read the files now.
    """
    name = manifest.adapter.engine_name
    if adapter.name != name:
        raise ProofFailed(adapter.name, Check.IDENTITY, f"the manifest is of {name}")
    await asyncio.to_thread(_check_files, manifest, adapter)
    began = time.perf_counter()
    try:
        digest = await engine.load(adapter)
        loaded = time.perf_counter()
        _check_digest(engine, manifest, adapter, digest)
        gap = await _check_probes(engine, manifest, adapter) if probes else 0.0
    except LoadFailed:
        raise  # A failed load leaves the slot free.
    except BaseException:
        await _unload(engine, adapter)
        raise
    probe_s = time.perf_counter() - loaded if probes else 0.0
    return Proof(digest, gap, loaded - began, probe_s)


async def _unload(engine: Engine, adapter: LoadedAdapter) -> None:
    with contextlib.suppress(EngineDown):
        await asyncio.shield(engine.unload(adapter))


def _check_files(manifest: Manifest, adapter: LoadedAdapter) -> None:
    for filename, ref in manifest.files.items():
        try:
            found = hashlib.sha256((adapter.folder / filename).read_bytes()).hexdigest()
        except FileNotFoundError as error:
            raise ProofFailed(adapter.name, Check.FILES, f"{filename} cannot be read: {error}") from error
        if found != ref.sha256:
            raise ProofFailed(adapter.name, Check.FILES, f"{filename} has sha256 {found}, expected {ref.sha256}")
    try:
        read_adapter(adapter.folder)
    except AdapterInvalid as error:
        raise ProofFailed(adapter.name, Check.FILES, str(error)) from error


def _check_digest(engine: Engine, manifest: Manifest, adapter: LoadedAdapter, held: str) -> None:
    dtype = engine.limits.dtype
    published = manifest.tensor_digests.get(dtype)
    if held != published:
        text = f"slot {adapter.slot_id} of the engine has digest {held}, expected {published} for {dtype}"
        raise ProofFailed(adapter.name, Check.DIGEST, text)


async def _check_probes(engine: Engine, manifest: Manifest, adapter: LoadedAdapter) -> float:
    if not manifest.probes:
        raise ProofFailed(adapter.name, Check.PROBES, "the manifest has no probes")
    expected, bound = joined([probe.logprobs for probe in manifest.probes]), manifest.probe_tolerance
    gap = math.inf
    for _ in range(2):  # in another batch the engine may choose other kernels, which round otherwise
        try:
            scores = np.concatenate(await await_all([engine.score(adapter, ids) for ids in ids_of(manifest.probes)]))
        except PromptInvalid as error:
            raise ProofFailed(adapter.name, Check.PROBES, str(error)) from error
        gap = mean_gap(scores, expected)
        if gap <= bound:
            return gap
    text = (
        f"mean |difference of logprobs| {gap:.2e} over {len(expected)} tokens, the tolerance in "
        f"{engine.limits.dtype} is {bound:.2e}"
    )
    raise ProofFailed(adapter.name, Check.PROBES, text)

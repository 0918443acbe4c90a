"""Versions to prove in `bench.proof`: trained ones, ones with a changed adapter, and another base model's files."""

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.messages import Calibration, Manifest, PoolDocument
from marlaas_worker.adapters import DTYPES, AdapterConfig, tensor_digests, write_adapter
from marlaas_worker.calibration import tolerance_of
from marlaas_worker.trainer.calibration import batch_of, calibrate, measured
from marlaas_worker.trainer.lora import initial_weights
from marlaas_worker.trainer.model import BaseModel

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
RANK = 16
OTHER_BASE = 0.02
"""Noise on each matrix of another base model, relative to the matrix's own scale."""


@dataclass(frozen=True)
class Version:
    """A published version, in a folder of its own."""

    manifest: Manifest
    folder: Path
    rate: float
    tensors: dict[str, torch.Tensor]


class Publisher:
    """The trainer's side: the base model, its calibration, and versions."""

    def __init__(self, pool: PoolDocument, dtype: str, folder: Path) -> None:
        self.path = pool.model_path
        self.model = BaseModel(pool.model_path, dtype=DTYPES[dtype])
        began = time.perf_counter()
        self.calibration: Calibration = calibrate(self.model, pool)
        self.calibrate_s = time.perf_counter() - began
        self._folder, self._numbers = folder, itertools.count()
        self._ids = [probe.ids for probe in self.calibration.probes]

    def chain(self, number: int, num_versions: int) -> Iterator[Version]:
        """Yield one agent's versions 1, 2, ...; each is one AdamW step after the one before."""
        rate = RATES[number % len(RATES)]
        adapter = self.model.attach(RANK, 2 * RANK, ())
        adapter.load(initial_weights(adapter.parameters, number, "bench"))
        optimizer = torch.optim.AdamW(adapter.parameters.values(), lr=rate, weight_decay=0.0)
        draw = torch.Generator().manual_seed(number)
        rows = self.model.write(torch.randint(self.model.vocab_size, (8, 1), generator=draw), 16, draw).tolist()
        for version in range(1, num_versions + 1):
            batch = batch_of([rows[place] for place in torch.randperm(len(rows), generator=draw)[:2].tolist()])
            logprobs = self.model.logprobs(adapter, batch, 1.0)
            loss = -(torch.randn(logprobs.shape, generator=draw) * logprobs).mean()
            self.model.backward(loss, batch)
            optimizer.step()
            optimizer.zero_grad()
            yield self.publish(number, version, adapter, rate)
        self.model.detach(adapter)

    def publish(self, agent: int, version: int, adapter: Any, rate: float) -> Version:
        tensors = adapter.tensors()
        probes = [torch.frombuffer(bytearray(ids), dtype=torch.int32).tolist() for ids in self._ids]
        return self.write(agent, version, tensors, rate, measured(self.model, adapter, probes))

    def write(
        self, agent: int, version: int, tensors: dict[str, torch.Tensor], rate: float, found: tuple[Any, float]
    ) -> Version:
        files = write_adapter(tensors, AdapterConfig(RANK, 2 * RANK))
        folder = self._folder / str(next(self._numbers))
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        refs = {name: BlobRef(name=name, sha256=sha256_hex(data), size_bytes=len(data)) for name, data in files.items()}
        manifest = Manifest(
            namespace="bench", job="job", uid="u", agent=f"a{agent}", version=version, step=version - 1, parent=None,
            rank=RANK, files=refs, state=None, tensor_digests=tensor_digests(tensors, 2.0), probes=found[0],
            probe_tolerance=max(self.calibration.tolerance, tolerance_of(found[1])),
        )  # fmt: skip
        return Version(manifest, folder, rate, tensors)


def changed(publisher: Publisher, version: Version, change: str, number: int) -> Version:
    """Return the version's adapter scaled by 2, or without one of its layers."""
    tensors = dict(version.tensors)
    ups = sorted(name for name in tensors if ".lora_B." in name)
    if change == "scaled":
        tensors = {name: 2 * tensor if ".lora_B." in name else tensor for name, tensor in tensors.items()}
    else:
        layer = ups[number % len(ups)]
        del tensors[layer], tensors[layer.replace(".lora_B.", ".lora_A.")]
    return publisher.write(0, version.manifest.version, tensors, version.rate, (version.manifest.probes, 0.0))


def write_other_base(model: Path, folder: Path, seed: int) -> None:
    """Copy a model's files, with noise of `OTHER_BASE` on its matrices."""
    folder.mkdir()
    shutil.copyfile(model / "config.json", folder / "config.json")
    draw = torch.Generator().manual_seed(seed)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=draw).mul_(OTHER_BASE * tensor.float().std())
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, folder / file.name, {"format": "pt"})

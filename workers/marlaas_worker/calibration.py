"""Self-test data shared by a pool's trainer and engines: probes, their tolerance, and a random test adapter.

A probe is a short token sequence with the trainer's logprobs of it. A trainer makes the probes and measures their tolerance
(`trainer/calibration.py`), and an engine is tested against them (`rollout/self_test.py`) before it serves. Imports neither peft nor vllm.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from marlaas_api.messages import Calibration, Probe, SelfTestSpec
from marlaas_api.names import derive_seed
from marlaas_api.wire import unpack_ids, unpack_logprobs
from marlaas_worker.adapters import DTYPES, AdapterConfig, tensor_name

NUM_PROBES = 16
NUM_TOKENS = 24
NUM_FLOAT32_PROBES = 8
"""Number of probes in a version's manifest, and in the self-test, if the engine computes in float32. Half of NUM_PROBES suffice: the
tolerance is FLOOR, not a multiple of noise, which needs more probes to average out. The mean over half of the probes is at most twice the
mean over all: 2.4e-5 in the worst version measured, a quarter of FLOOR (docs/reference/measurements.md, "Proof")."""
NOISE_FACTOR = 5.0
FLOOR = 1e-4
LEAST_SHIFT = 10.0
"""The self-test passes only if its adapter changes the probes' logprobs by at least this many times the tolerance, on average."""

ROUNDING_FACTOR = 2.0
"""`rounding_warning` warns if an engine's distance from float32 is more than this many times the trainer's noise, and above FLOOR. Correct
engines had at most 1.3 times (bench/proof.py)."""

_SAMPLE_BYTES = 1 << 15


def tolerance_of(noise: float) -> float:
    """Return the mean |difference of logprobs| on the probes up to which an engine agrees with the trainer: max(FLOOR, NOISE_FACTOR * noise).

    noise: mean |difference| between the trainer's logprobs in the engine's dtype and in float32.
    Over 1,000 versions, an engine's distance from float32 was at most 1.3 times that noise, so a correct engine stays
    below a third of the tolerance (bench/proof.py).
    FLOOR is for float32, where noise counts as 0: another order of summation alone causes differences of 1e-7 to
    1e-5.
    """
    return max(FLOOR, NOISE_FACTOR * noise)


def rounding_warning(distance: float, calibration: Calibration) -> str:
    """Return a warning if an engine computes less exactly than the trainer in the same dtype; else an empty text.

    vLLM's kernels for CPUs without bfloat16 instructions (`_C_AVX2`, `_C_AVX512`) cut a float32 off instead of rounding it: each result of
    a norm, activation or rotation is too small by 0.3 % on average, and through all layers the errors add up.

    Args:
        distance: mean |difference| between the engine's logprobs on the probes and the trainer's in float32.
        calibration: the pool's, with the dtype and the trainer's noise in it.
    """
    if distance <= max(FLOOR, ROUNDING_FACTOR * calibration.noise):
        return ""
    return (
        f"the engine's logprobs on the probes differ from float32 by {distance:.2g} per token in {calibration.dtype}, the trainer's by "
        f"{calibration.noise:.2g}: it computes less exactly than the trainer, and importance weights will vary; set the pool's "
        "rollout.dtype to float32, or use a machine with bfloat16 instructions (avx512_bf16, AMX, a GPU)"
    )


def num_sufficient(dtype: str) -> int:
    """Return the number of probes in each version's manifest, and in the self-test, for engines that compute in this dtype."""
    return NUM_FLOAT32_PROBES if dtype == "float32" else NUM_PROBES


def sufficient_probes(calibration: Calibration) -> tuple[Probe, ...]:
    """Return the probes to use in each version's manifest and in the self-test: in float32 the first `NUM_FLOAT32_PROBES`, else all."""
    return calibration.probes[: num_sufficient(calibration.dtype)]


def draw_adapter(self_test: SelfTestSpec, dtype: str) -> tuple[dict[str, torch.Tensor], AdapterConfig]:
    """Draw the self-test's adapter, the same on every machine; return its tensors, by PEFT's names, rounded to `dtype`, and its settings.

    The entries of A are uniform with variance 1/in, those of B uniform with the standard deviation `AdaptedLayer.size` of their layer.
    """
    tensors = {}
    for module, layer in sorted(self_test.layers.items()):
        shapes = {"A": (self_test.rank, layer.columns), "B": (layer.rows, self_test.rank)}
        bounds = {"A": math.sqrt(3.0 / layer.columns), "B": math.sqrt(3.0) * layer.size}
        for kind in ("A", "B"):
            draw = torch.Generator().manual_seed(derive_seed(self_test.seed, module, kind))
            drawn = torch.empty(shapes[kind], dtype=torch.float32).uniform_(-bounds[kind], bounds[kind], generator=draw)
            tensors[tensor_name(module, kind)] = drawn.to(DTYPES[dtype])
    return tensors, AdapterConfig(self_test.rank, self_test.rank)


def zero_adapter(self_test: SelfTestSpec) -> tuple[dict[str, torch.Tensor], AdapterConfig]:
    """Return tensors and settings of the smallest adapter without effect: zeros of rank 1, on the layer with the first name only."""
    module, layer = min(self_test.layers.items())
    tensors = {
        tensor_name(module, "A"): torch.zeros(1, layer.columns, dtype=torch.float32),
        tensor_name(module, "B"): torch.zeros(layer.rows, 1, dtype=torch.float32),
    }
    return tensors, AdapterConfig(1, 1)


def fingerprint(model: Path) -> str:
    """Return a base model's identity (sha256, hex) from its files. model: its folder.

    The hash covers config.json and, of every tensor, its name, shape, dtype, and first and last 32 KiB.
    Training changes nearly every value of a tensor, so the hash distinguishes two checkpoints without reading
    all of a large model.

    Raises:
        OSError: config.json or a weights file cannot be read.
        ValueError, KeyError: a file is truncated or not in the safetensors format.
    """
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            begin = 8 + int.from_bytes(stream.read(8), "little")
            if begin > file.stat().st_size:
                raise ValueError(f"{file.name} is cut off or in another format")
            header = stream.read(begin - 8)
            digest.update(f"{file.name}\0".encode() + header)
            for name, tensor in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    first, last = (begin + offset for offset in tensor["data_offsets"])
                    stream.seek(first)
                    digest.update(stream.read(min(_SAMPLE_BYTES, last - first)))
                    stream.seek(max(first, last - _SAMPLE_BYTES))
                    digest.update(stream.read(last - stream.tell()))
    return digest.hexdigest()


def ids_of(probes: Sequence[Probe]) -> list[npt.NDArray[np.int32]]:
    """Return the token ids of each probe: one int32 array [T] per probe, T its length."""
    return [unpack_ids(probe.ids) for probe in probes]


def joined(logprobs: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Unpack the logprobs of several probes and concatenate them into one float32 array [sum of the probes' T - 1]."""
    return np.concatenate([unpack_logprobs(packed) for packed in logprobs])


def mean_gap(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return the mean absolute difference, in nats, of two arrays of logprobs of the same tokens, such as two results of `joined`."""
    return float(np.abs(one - other).mean())

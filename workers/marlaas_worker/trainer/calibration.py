"""Calibration of a pool: its probes, the noise of its model's logprobs from rounding, and the expected results of the self-test.

Runs at every start of a trainer, on the compute thread. Trainers of one pool on equal machines write equal
calibrations.

Probes are short token sequences whose logprobs show that an engine computes the same as the trainer. The base model
generates them. Random ids would be so improbable that rounding moves their logprobs several times more, while a
wrong adapter moves them no further, so that it would be harder to detect (bench/proof.py).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from marlaas_api import subjects, wire
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import AdaptedLayer, Calibration, PoolDocument, Probe, SelfTestSpec
from marlaas_api.names import derive_seed
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import choose_dtype, tensor_digest
from marlaas_worker.calibration import (
    LEAST_SHIFT,
    NUM_PROBES,
    NUM_TOKENS,
    draw_adapter,
    fingerprint,
    joined,
    mean_gap,
    num_sufficient,
    tolerance_of,
)
from marlaas_worker.devices import uses_gpu
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.batching import MicroBatch, chain, collate
from marlaas_worker.trainer.lora import AttachedAdapter
from marlaas_worker.trainer.model import BaseModel, example

log = logging.getLogger(__name__)

_PROBE_SEED = 2026
_SEED = 1
_SIZES = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Sizes to try of the self-test adapter's output, relative to its layer's output.

The smallest that suffices is used, because rounding grows more from layer to layer with a larger adapter.
"""


def write_probes(model: BaseModel) -> Tensor:
    """Return ids [NUM_PROBES, NUM_TOKENS] sampled from the base model at temperature 1, the same at every call.

    Each row starts with its own first token, derived from a fixed seed.
    """
    first = [derive_seed(_PROBE_SEED, "probe", number) % model.vocab_size for number in range(NUM_PROBES)]
    return model.write(torch.tensor(first)[:, None], NUM_TOKENS, torch.Generator().manual_seed(_PROBE_SEED))


def batch_of(probes: Sequence[Sequence[int]]) -> MicroBatch:
    """Return the probes as one micro-batch in which every token but the first is predicted."""
    return collate([chain(example(ids)) for ids in probes])


def measured(
    model: BaseModel, adapter: AttachedAdapter | None, probes: Sequence[Sequence[int]]
) -> tuple[tuple[Probe, ...], float]:
    """Return the probes with their float32 logprobs under an adapter (None: the base model), and the noise of the model's dtype.

    noise: mean |difference| between the logprobs in float32 and in the model's dtype; 0 for a float32 model.
    """
    batch = batch_of(probes)
    noise = 0.0
    with torch.no_grad():
        logprobs = model.logprobs(adapter, batch, 1.0).float()
    if model.dtype != torch.float32:
        precise = model.precise_logprobs(adapter, batch)
        noise = (precise - logprobs).abs().mean().item()
        logprobs = precise
    parts = torch.split(logprobs.cpu(), [len(ids) - 1 for ids in probes])
    packed = (pack_logprobs(part.tolist()) for part in parts)
    return tuple(Probe(ids=pack_ids(ids), logprobs=one) for ids, one in zip(probes, packed, strict=True)), noise


class CalibrationFailed(InvalidInput):
    """Rounding moves the base model's logprobs about as far as the self-test's largest adapter, so the test could not detect a wrong engine."""


def engine_dtype(pool: PoolDocument) -> str:
    """Return the name of the dtype in which the pool's engines compute, if their machines are like this one.

    An engine in another dtype finds no calibration, waits for one, and reports that it waits.
    """
    on_gpu = pool.spec.rollout.engine == "vllm" and uses_gpu()
    return choose_dtype(pool.spec.rollout.dtype, on_gpu)


def calibrate(model: BaseModel, pool: PoolDocument) -> Calibration:
    """Measure a pool's calibration with its base model: probes, noise, tolerance and self-test. Raises CalibrationFailed."""
    dtype = engine_dtype(pool)
    ids = write_probes(model).tolist()
    probes, noise = measured(model, None, ids)
    tolerance = tolerance_of(noise)
    for size in _SIZES:
        test = _self_test(model, _drawn(model, pool.spec.max_rank, size), dtype, ids)
        judged = slice(num_sufficient(dtype))
        shift = mean_gap(joined(test.logprobs[judged]), joined([probe.logprobs for probe in probes[judged]]))
        # Even an engine that is off by both tolerances then shifts by LEAST_SHIFT tolerances.
        needed = (LEAST_SHIFT + 1) * tolerance + test.tolerance
        if shift >= needed:
            break
    else:
        raise CalibrationFailed(
            f"{pool.model_path} in {dtype}: rounding moves the probes' logprobs by {noise:.2e} and the self-test's adapter by {shift:.2e}, but "
            f"{needed:.2e} is needed to distinguish them; set the pool's rollout.dtype to float32, or use another model"
        )
    log.info("calibrated for %s: noise %.2e, tolerance %.2e, self-test %.2e", dtype, noise, tolerance, shift)
    base = fingerprint(Path(pool.model_path))
    return Calibration(
        pool=pool.name, base=base, dtype=dtype, noise=noise, tolerance=tolerance, probes=probes, self_test=test
    )


async def publish(context: RoleContext, calibration: Calibration) -> None:
    """Write the calibration for the pool's engines. Raises BusUnavailable."""
    bucket = await context.bus.bucket(subjects.CALIBRATIONS, inspected=False)
    signed = calibration.model_copy(update={"trainer": context.name, "at": context.now()})
    await bucket.put(subjects.calibration_key(calibration.pool, calibration.dtype), wire.encode(signed))


def _drawn(model: BaseModel, rank: int, size: float) -> SelfTestSpec:
    """Describe a random adapter whose output is about `size` times the output of each adapted layer; the expected results are empty."""
    layers: Mapping[str, tuple[int, int, float]] = model.layer_shapes()
    return SelfTestSpec(
        seed=_SEED,
        rank=rank,
        layers={
            name: AdaptedLayer(rows=rows, columns=columns, size=size * scale * (columns / rank) ** 0.5)
            for name, (rows, columns, scale) in layers.items()
        },
        sha256="",
        logprobs=(),
        tolerance=0.0,
    )


def _self_test(model: BaseModel, drawn: SelfTestSpec, dtype: str, ids: list[list[int]]) -> SelfTestSpec:
    """Return `drawn` with the expected results: digest, logprobs and tolerance.

    Args:
        drawn: describes the self-test's adapter.
        dtype: name of the dtype in which the engines compute.
        ids: token ids of the probes.
    """
    tensors, config = draw_adapter(drawn, dtype)
    targets = sorted({name.rsplit(".", 1)[-1] for name in drawn.layers})
    adapter = model.attach(config.rank, config.alpha, targets)
    try:
        adapter.load({name: tensor.float() for name, tensor in tensors.items()})
        probes, noise = measured(model, adapter, ids)
    finally:
        model.detach(adapter)
    expected = {
        "sha256": tensor_digest(tensors, config.scaling, dtype),
        "logprobs": tuple(probe.logprobs for probe in probes),
        "tolerance": tolerance_of(noise),
    }
    return drawn.model_copy(update=expected)

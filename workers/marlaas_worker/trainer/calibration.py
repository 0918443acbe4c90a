"""Calibration of a pool: how far this model's logprobs move by rounding alone, and what the self-test's adapter must show.

Done at every start of a trainer, on the compute thread. Trainers of one pool on equal machines write the same.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from marlaas_api import subjects, wire
from marlaas_api.errors import Permanent
from marlaas_api.messages import AdaptedLayer, Calibration, PoolDocument, SelfTestSpec
from marlaas_worker.adapters import tensor_digest
from marlaas_worker.calibration import (
    LEAST_SHIFT,
    draw_adapter,
    fingerprint,
    is_adaptable,
    joined,
    mean_gap,
    tolerance_of,
)
from marlaas_worker.dtypes import choose_dtype
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.probes import measured, write_probes

log = logging.getLogger(__name__)

_SEED = 1
_SIZES = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Output of the self-test's adapter against that of the layer it is on, the smallest first: the larger, the more rounding grows from layer to layer."""


class CalibrationFailed(Permanent):
    """The base model moves by rounding as far as by any adapter: no engine could be told from a wrong one."""


def engine_dtype(pool: PoolDocument) -> str:
    """What the pool's engines compute in, judged by this machine: an engine for whose dtype there is no calibration waits and says so."""
    on_gpu = pool.spec.rollout.engine == "vllm" and torch.cuda.is_available()
    return choose_dtype(pool.spec.rollout.dtype, on_gpu)


def calibrate(model: BaseModel, pool: PoolDocument) -> Calibration:
    """Measure. Raises CalibrationFailed."""
    dtype, ids = engine_dtype(pool), write_probes(model).tolist()
    probes, noise = measured(model, None, ids)
    tolerance = tolerance_of(noise)
    for size in _SIZES:
        test = _self_test(model, _drawn(model, pool.spec.max_rank, size), dtype, ids)
        shift = mean_gap(joined(test.logprobs), joined([probe.logprobs for probe in probes]))
        needed = (
            LEAST_SHIFT + 1
        ) * tolerance + test.tolerance  # an engine within both tolerances then shifts by LEAST_SHIFT
        if shift >= needed:
            break
    else:
        raise CalibrationFailed(
            f"{pool.model_path} in {dtype}: rounding moves the probes' logprobs by {noise:.2e} and the self-test's adapter by {shift:.2e}, but "
            f"{needed:.2e} is needed to tell one from the other; set the pool's rollout.dtype to float32, or use another model"
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
    """The description of an adapter whose output is about `size` times that of each layer that it is on."""
    layers: Mapping[str, tuple[int, int, float]] = model.layer_shapes()
    return SelfTestSpec(
        seed=_SEED,
        rank=rank,
        layers={
            name: AdaptedLayer(rows=rows, columns=columns, size=size * scale * (columns / rank) ** 0.5)
            for name, (rows, columns, scale) in layers.items()
            if is_adaptable(name)
        },
        sha256="",
        logprobs=(),
        tolerance=0.0,
    )


def _self_test(model: BaseModel, drawn: SelfTestSpec, dtype: str, ids: list[list[int]]) -> SelfTestSpec:
    """The description with its expectations: digest, logprobs, tolerance."""
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

"""Finds the pool's calibration: probes and the largest allowed difference of logprobs, from a trainer. The engine is tested against it."""

import asyncio
import logging

from marlaas_api import subjects, wire
from marlaas_api.bus import Bus
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import Calibration
from marlaas_worker.adapters import DTYPES

POLL_S = 0.5
_log = logging.getLogger(__name__)


class Calibrations:
    """Finds the calibration of a pool for one base model and dtype.

    A trainer of the pool writes it to the bucket `calibrations`.

    Args:
        bus: the bus with the bucket.
        pool: name of the pool.
        base: fingerprint of the engine's base model.
        dtype: the dtype in which the engine computes.

    Attributes:
        reason: text that explains why no calibration was found yet.
    """

    def __init__(self, bus: Bus, pool: str, base: str, dtype: str) -> None:
        self._bus, self._pool, self._base, self._dtype = bus, pool, base, dtype
        self._found: Calibration | None = None
        self.reason = f"waiting for a trainer of pool {pool} to calibrate the base model for {dtype}"

    @property
    def tolerance(self) -> float:
        """Largest allowed mean |difference| between the engine's and the trainer's logprobs; 0 before the calibration was found."""
        return self._found.tolerance if self._found else 0.0

    async def wait(self) -> Calibration:
        """Poll until the calibration exists, and return it. Meanwhile, log each new reason why it was not found."""
        logged = ""
        while self._found is None:
            try:
                self._found, reason = await self._look()
            except MarlaasError as error:
                reason = f"the calibration of pool {self._pool} cannot be read: {error}"
            if self._found is not None:
                break
            if reason != logged:
                _log.info("%s", reason)
            self.reason = logged = reason
            await asyncio.sleep(POLL_S)
        return self._found

    async def _look(self) -> tuple[Calibration | None, str]:
        known = {dtype: await self._read(dtype) for dtype in DTYPES}
        found = known[self._dtype]
        if found is not None and found.base == self._base:
            return found, ""
        if found is not None:
            theirs, ours = found.base[:12], self._base[:12]
            return (
                None,
                f"trainer {found.trainer} of pool {self._pool} has base model {theirs}, this engine {ours}; waiting for a calibration of the same",
            )
        others = [dtype for dtype, one in known.items() if one is not None and one.base == self._base]
        if others:
            return None, (
                f"the trainer of pool {self._pool} has calibrated for {' and '.join(others)}, this engine computes in {self._dtype}; "
                f"set the pool's rollout.dtype to one of them instead of auto"
            )
        return None, f"waiting for a trainer of pool {self._pool} to calibrate the base model for {self._dtype}"

    async def _read(self, dtype: str) -> Calibration | None:
        bucket = await self._bus.bucket(subjects.CALIBRATIONS, inspected=False)
        entry = await bucket.get(subjects.calibration_key(self._pool, dtype))
        return None if entry is None or entry.data is None else wire.decode_as(Calibration, entry.data, entry.key)

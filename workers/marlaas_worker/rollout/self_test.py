"""Self-test of an engine at every start and restart: each slot's adapter must be applied, and to its own rows only.

A digest shows the content of a slot, not that a forward pass uses it. The probes do not show it either: after a
small optimizer step, the effect of the adapter is less than rounding. So the test loads a large random adapter
into each slot in turn, with an adapter of zeros in all others. The large adapter must shift the logprobs of the
probes as it does in the trainer.

Scoring is one pass over a prompt. Generation runs other kernels, on a GPU from recorded graphs. So each slot also
generates, and the engine's scores of the generated tokens must agree with the logprobs that it reported. This also
compiles the kernels of generation before the first turn needs them.

The probes and the largest allowed difference of logprobs are the pool's calibration, which comes from a trainer (`Calibrations`).
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from marlaas_api import subjects, wire
from marlaas_api.background import await_all
from marlaas_api.bus import Bus
from marlaas_api.errors import MarlaasError, Permanent
from marlaas_api.messages import Calibration
from marlaas_worker.adapters import DTYPES, AdapterConfig, tensor_digest, write_adapter
from marlaas_worker.calibration import (
    LEAST_SHIFT,
    draw_adapter,
    ids_of,
    joined,
    mean_gap,
    rounding_warning,
    sufficient_probes,
    zero_adapter,
)
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed, Sampling

POLL_S = 0.5
NUM_GENERATED = 8
"""Most tokens that are generated in one try with a slot's adapter. The prompt is this many tokens too: the first ones of a probe."""
_TRIES = 3
_FEW_TOKENS = 3.0
"""Factor on the tolerance for the few generated tokens, because the tolerance itself is for a mean over hundreds of tokens. If another
adapter were applied, the logprobs would differ by ten tolerances or more."""
_log = logging.getLogger(__name__)

Scores = npt.NDArray[np.float32]


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


class SelfTestFailed(Permanent):
    """The engine does not apply the adapters in its slots as the trainer does, or this cannot be tested. None of its output can be trusted."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The trainer's logprobs of the self-test's probes, and how far the engine's may be from them.

    Attributes:
        zero: logprobs under an adapter of zeros; one float32 array [T] for all probes together, without the first token of each.
        large: logprobs of the same tokens under the self-test's random adapter, whose effect is large; float32 [T].
        zero_tolerance: largest mean |difference| of the engine's logprobs from `zero` that passes, in nats.
        large_tolerance: largest mean |difference| of the engine's logprobs from `large` that passes, in nats.
    """

    zero: Scores
    large: Scores
    zero_tolerance: float
    large_tolerance: float


def judge(expected: Expected, zero: Scores, large: Scores) -> str:
    """Return why the engine's logprobs of the probes are wrong; empty if they are right.

    Args:
        expected: the trainer's logprobs, with tolerances.
        zero: the engine's logprobs under an adapter of zeros, float32 [T], for the tokens of `Expected.zero`.
        large: the engine's logprobs of these tokens under the self-test's large random adapter, float32 [T].
    """
    gap = mean_gap(zero, expected.zero)
    if not gap <= expected.zero_tolerance:
        return (
            f"with an adapter of zeros the mean |difference of logprobs| from the trainer's is {gap:.2e}, the tolerance "
            f"is {expected.zero_tolerance:.2e}: another base model, or another slot's adapter is applied to these rows"
        )
    shift, least = mean_gap(large, zero), LEAST_SHIFT * expected.zero_tolerance
    if not shift >= least:
        return f"a large random adapter moves the logprobs by {shift:.2e}, expected at least {least:.2e}: it is not applied"
    gap = mean_gap(large, expected.large)
    if not gap <= expected.large_tolerance:
        return (
            f"under a large random adapter the mean |difference of logprobs| from the trainer's is {gap:.2e}, the "
            f"tolerance is {expected.large_tolerance:.2e}: it is applied in part, or wrongly"
        )
    return ""


def judge_generated(scored: Scores, reported: Scores, tolerance: float) -> str:
    """Return why the logprobs that the engine reported with generated tokens are wrong; empty if they agree with its scores.

    Args:
        scored: the engine's scores of the generated tokens, float32 [T].
        reported: the logprobs with which it generated them, float32 [T].
        tolerance: largest mean |difference| that passes, in nats.
    """
    gap = mean_gap(reported, scored)
    if gap <= tolerance:
        return ""
    return (
        f"the logprobs of tokens that it generated differ by {gap:.2e} from the engine's own scores of them, the tolerance is "
        f"{tolerance:.2e}: generation does not apply the adapter as scoring does"
    )


class EngineSelfTest:
    """Tests whether an engine applies the adapter in each of its slots. The engine has no adapters before and after a test.

    Args:
        calibration: the trainer's logprobs of the probes, their tolerances, and the test adapter's specification.
        folder: for the files of the two test adapters; removed after a test.
        numbers: source of unused slot numbers (`LoadedAdapter.slot_id`).
    """

    def __init__(self, calibration: Calibration, folder: Path, numbers: Iterator[int]) -> None:
        self._calibration, self._folder, self._numbers = calibration, folder, numbers
        test, probes = calibration.self_test, sufficient_probes(calibration)
        self._probes = ids_of(probes)
        self._expected = Expected(
            zero=joined([probe.logprobs for probe in probes]),
            large=joined(test.logprobs[: len(probes)]),
            zero_tolerance=calibration.tolerance,
            large_tolerance=test.tolerance,
        )

    async def run(self, engine: Engine) -> float:
        """Test every slot, and return how far the engine's logprobs are from float32. Raises SelfTestFailed, EngineDown.

        Returns:
            The mean |difference| between the engine's logprobs of the probes under an adapter of zeros and the trainer's, which were computed
            in float32; in nats.
        """
        began = time.perf_counter()
        try:
            await asyncio.to_thread(self._prepare)
            zero = await self._test_slots(engine)
        except LoadFailed as error:
            raise SelfTestFailed(f"the engine's self-test failed: it refuses the test's adapter: {error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        slots, seconds, tolerance = engine.limits.slots, time.perf_counter() - began, self._calibration.tolerance
        distance = mean_gap(zero, self._expected.zero)
        _log.info(
            "self-test passed: %d slots in %.1f s, tolerance %.2e, distance %.2e", slots, seconds, tolerance, distance
        )
        if words := rounding_warning(distance, self._calibration):
            _log.warning("%s", words)
        return distance

    def _prepare(self) -> None:
        """Write the files of the two test adapters. Raises SelfTestFailed if the large one differs from the trainer's."""
        test, dtype = self._calibration.self_test, self._calibration.dtype
        tensors, config = draw_adapter(test, dtype)
        found = tensor_digest(tensors, config.scaling, dtype)
        if found != test.sha256:
            raise SelfTestFailed(
                f"the engine's self-test failed: its adapter is drawn with digest {found[:12]} here, with {test.sha256[:12]} by the trainer; "
                "run both with one version of torch"
            )
        self._write("large", tensors, config)
        self._write("zero", *zero_adapter(test))

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor], config: AdapterConfig) -> None:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for filename, data in write_adapter(tensors, config).items():
            (folder / filename).write_bytes(data)

    async def _test_slots(self, engine: Engine) -> Scores:
        """Test each slot in turn, and return the logprobs of the probes with an adapter of zeros in all slots.

        An engine loads an adapter into its first free slot. So after one zero adapter is unloaded, the next
        load goes into the slot under test.
        """
        loaded: list[LoadedAdapter] = []
        num_slots = engine.limits.slots
        try:
            for slot in range(num_slots):
                loaded.append(await self._load(engine, "zero", slot))
            zero = await self._score(engine, loaded[0])
            for slot in range(num_slots):
                await engine.unload(loaded[slot])
                loaded[slot] = await self._load(engine, "large", slot)
                beside = dict.fromkeys((loaded[slot], loaded[(slot + 1) % num_slots]))
                large, *others = await await_all([self._score(engine, adapter) for adapter in beside])
                self._require(slot, num_slots, judge(self._expected, others[0] if others else zero, large))
                tolerances = (self._expected.large_tolerance, self._expected.zero_tolerance)
                for words in await await_all(
                    [self._generate(engine, *pair) for pair in zip(beside, tolerances, strict=False)]
                ):
                    self._require(slot, num_slots, words)
                await engine.unload(loaded[slot])
                loaded[slot] = await self._load(engine, "zero", slot)
            return zero
        finally:
            with contextlib.suppress(EngineDown):
                for adapter in loaded:
                    await asyncio.shield(engine.unload(adapter))

    async def _load(self, engine: Engine, name: str, slot: int) -> LoadedAdapter:
        adapter = LoadedAdapter(f"self-test.{name}.{slot}", next(self._numbers), self._folder / name)
        await engine.load(adapter)
        return adapter

    async def _score(self, engine: Engine, adapter: LoadedAdapter) -> Scores:
        return np.concatenate(await await_all([engine.score(adapter, ids) for ids in self._probes]))

    async def _generate(self, engine: Engine, adapter: LoadedAdapter, tolerance: float) -> str:
        prompt, words = self._probes[0][:NUM_GENERATED], ""
        for seed in range(_TRIES):  # a reply may end at its first token, which is computed with the prompt
            sampling = Sampling(temperature=1.0, max_tokens=NUM_GENERATED, seed=seed)
            made = await engine.generate(f"generate.{seed}.{adapter.name}", adapter, prompt, sampling)
            scores = await engine.score(adapter, np.concatenate((prompt, np.array(made.output_ids, np.int32))))
            reported = np.array(made.logprobs, np.float32)
            words = judge_generated(scores[len(prompt) - 1 :], reported, _FEW_TOKENS * tolerance)
            if not words and len(reported) > 1:
                return ""
        return words

    def _require(self, slot: int, num_slots: int, words: str) -> None:
        if words:
            raise SelfTestFailed(f"the engine's self-test failed in slot {slot + 1} of {num_slots}: {words}")

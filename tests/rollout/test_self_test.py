"""The engine's self-test: an engine that applies its slots passes it, and each way of not applying them is found and named."""

import re

import numpy as np
import pytest
from tests.rollout.conftest import linear_shapes
from tests.tables import rows

from marlaas_api.messages import AdaptedLayer, Calibration, Probe, SelfTestSpec
from marlaas_api.wire import pack_ids, pack_logprobs, unpack_logprobs
from marlaas_worker.adapters import tensor_digest, write_adapter
from marlaas_worker.calibration import draw_adapter, fingerprint, rounding_warning
from marlaas_worker.rollout import self_test
from marlaas_worker.rollout.engine import LoadFailed
from marlaas_worker.rollout.self_test import Expected, SelfTestFailed, judge

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROBES = [np.arange(first, first + 24, dtype=np.int32) for first in (2, 30, 50, 70)]


@pytest.fixture(scope="session")
def calibration(small_model, hf_logprobs, tmp_path_factory):
    """As a trainer writes it, but computed by transformers and peft, which share no code with engine or trainer."""
    shapes = linear_shapes(small_model)
    layers = {name: AdaptedLayer(rows=rows, columns=columns, size=0.5) for name, (rows, columns) in shapes.items()}
    drawn = SelfTestSpec(seed=1, rank=8, layers=layers, sha256="", logprobs=(), tolerance=1e-4)
    tensors, config = draw_adapter(drawn, "float32")
    folder = tmp_path_factory.mktemp("self-test")
    for name, data in write_adapter(tensors, config).items():
        (folder / name).write_bytes(data)
    sha256 = tensor_digest(tensors, config.scaling, "float32")
    logprobs = tuple(pack_logprobs(hf_logprobs(folder, ids, 1.0)) for ids in PROBES)
    return Calibration(
        **{"pool": "pool", "base": fingerprint(small_model), "dtype": "float32", "noise": 0.0, "tolerance": 1e-4},
        probes=tuple(Probe(ids=pack_ids(ids), logprobs=pack_logprobs(hf_logprobs(None, ids, 1.0))) for ids in PROBES),
        self_test=drawn.model_copy(update={"sha256": sha256, "logprobs": logprobs}),
    )


@pytest.fixture
def run_test(calibration, tmp_path, slot_ids):
    def run(engine, **changes):
        changed = calibration.model_copy(update=changes)
        return self_test.EngineSelfTest(changed, tmp_path / "files", iter(slot_ids, 0)).run(engine)

    return run


class Faulty:
    """An engine in front of a good one that scores or generates with another adapter than asked. Its digests are right all the same.

    instead, generates: choose the kind of the adapter, given the one that was asked for; None: that one.
    """

    def __init__(self, engine, instead=lambda _: None, generates=lambda _: None):
        self._engine, self.limits, self.loaded = engine, engine.limits, []
        self._instead, self._generates = instead, generates

    async def load(self, adapter):
        await self._engine.load(adapter)
        self.loaded.append(adapter)

    async def unload(self, adapter):
        await self._engine.unload(adapter)
        self.loaded = [one for one in self.loaded if one != adapter]

    async def score(self, adapter, ids):
        return await self._engine.score(self._of(self._instead(adapter), adapter), ids)

    async def generate(self, request, adapter, prompt, sampling):
        return await self._engine.generate(request, self._of(self._generates(adapter), adapter), prompt, sampling)

    def _of(self, kind, adapter):
        return next((one for one in self.loaded if f".{kind}." in one.name), adapter)


async def test_an_engine_that_applies_its_slots_passes_with_its_distance_and_is_left_empty(
    harness, run_test, publish, tmp_path, calibration
):
    assert await run_test(harness.engine) < 1e-5
    moved = [(probe, unpack_logprobs(probe.logprobs) - 5e-5) for probe in calibration.probes]
    away = tuple(probe.model_copy(update={"logprobs": pack_logprobs(moved)}) for probe, moved in moved)
    assert await run_test(harness.engine, probes=away) == pytest.approx(5e-5, rel=0.2)
    assert not (tmp_path / "files").exists()
    for seed in range(harness.engine.limits.slots):
        await harness.load(publish(seed))


@pytest.mark.parametrize(("distance", "noise", "warns"), rows(__file__, "distances"))
async def test_an_engine_that_rounds_worse_than_the_trainer_is_told_with_its_figure(
    calibration, distance, noise, warns
):
    said = rounding_warning(distance, calibration.model_copy(update={"noise": noise, "dtype": "bfloat16"}))
    words = f"the engine's logprobs on the probes differ from float32 by {distance} per token"
    assert (said != "", said.startswith(words)) == (warns, warns)


FAULTS = {
    r"slot 1 of 6: .* moves the logprobs by 0\.00e\+00, expected at least 1\.00e-03: it is not applied": lambda _: (
        "zero"
    ),
    r"slot 6 of 6: .* it is not applied": lambda one: "zero" if one.name.endswith(".large.5") else None,
    r"slot 1 of 6: with an adapter of zeros .* another slot's adapter is applied to these rows": lambda _: "large",
}


@pytest.mark.parametrize(("words", "fault"), FAULTS.items())
async def test_slots_that_are_not_applied_to_their_own_rows_are_found(reference, run_test, fault, words):
    await reference.start()
    with pytest.raises(SelfTestFailed, match=words):
        await run_test(Faulty(reference, fault))
    for kind in ("zero", "large"):  # its graphs for generation have another adapter, or that of another row
        with pytest.raises(SelfTestFailed, match=r"slot 1 of 6: the logprobs of tokens that it generated differ by"):
            await run_test(Faulty(reference, generates=lambda _, kind=kind: kind))
    await run_test(reference)


async def test_a_refused_adapter_another_base_model_and_another_drawing_are_found(reference, run_test, calibration):
    async def refuse(adapter):
        raise LoadFailed("no such layer")

    await reference.start()
    engine = Faulty(reference, lambda _: "zero")
    engine.load = refuse
    with pytest.raises(SelfTestFailed, match="refuses the test's adapter: no such layer"):
        await run_test(engine)
    moved = [Probe(ids=probe.ids, logprobs=pack_logprobs(np.full(23, -1.0))) for probe in calibration.probes]
    with pytest.raises(SelfTestFailed, match="another base model"):
        await run_test(reference, probes=tuple(moved))
    with pytest.raises(SelfTestFailed, match="run both with one version of torch"):
        await run_test(reference, self_test=calibration.self_test.model_copy(update={"seed": 2}))


@pytest.mark.parametrize(("zero", "large", "words"), rows(__file__, "scores"))
async def test_scores_are_judged_by_both_tolerances_and_by_the_shift(zero, large, words):
    base, moved, zero, large = (np.full(4, value, np.float32) for value in (-2.0, -3.0, zero, large))
    found = judge(Expected(base, moved, zero_tolerance=0.1, large_tolerance=0.3), zero, large)
    assert (found == "") == (words == "")
    assert re.search(words, found)

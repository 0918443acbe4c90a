"""Calibration of a pool: noise by hand, and a 16-bit model computed in float32."""

import json

import numpy as np
import pytest
import torch
from tests.harness import pool_document
from tests.trainer.test_model import attach

from marlaas_api.wire import unpack_ids, unpack_logprobs
from marlaas_worker import calibration as agreed
from marlaas_worker.adapters import as_held, tensor_digest
from marlaas_worker.trainer import calibration
from marlaas_worker.trainer.calibration import CalibrationFailed, batch_of, calibrate
from marlaas_worker.trainer.model import BaseModel

IDS = [[3, 9, 27, 17, 5, 40, 8, 2], [1, 60, 33, 12, 7, 7, 21, 50]]


@pytest.fixture(scope="module")
def half(tiny_model):
    return BaseModel(str(tiny_model), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def rounded(tiny_model, tmp_path_factory):
    """The same model in float32, its weights rounded to bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("rounded")
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).float().save_pretrained(folder)
    return BaseModel(str(folder), dtype=torch.float32)


def test_a_16_bit_model_computed_in_float32_equals_a_float32_model_of_its_weights(half, rounded):
    before = [(one, one.dtype, one.detach().clone()) for one in half._model.parameters()]
    batch = batch_of(IDS)
    found = half.precise_logprobs(attach(half, 5), batch)
    with torch.no_grad():
        expected = rounded.logprobs(attach(rounded, 5), batch, 1.0)
        coarse = half.logprobs(None, batch, 1.0)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5
    assert coarse.shape == found.shape
    assert all(one.dtype == dtype and torch.equal(one, kept) for one, dtype, kept in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_calibration_holds_the_dtypes_noise_and_an_adapter_that_moves_ten_tolerances(tiny_model, half, base, dtype):
    model = half if dtype == "bfloat16" else base
    found = calibrate(model, pool_document(tiny_model, maxRank=8, rollout={"dtype": dtype}))
    ids = [unpack_ids(probe.ids).tolist() for probe in found.probes]
    assert [len(one) for one in ids] == [24] * 16
    zero = np.concatenate([unpack_logprobs(probe.logprobs) for probe in found.probes])
    with torch.no_grad():
        coarse = model.logprobs(None, batch_of(ids), 1.0).numpy()
    assert found.noise == pytest.approx(float(np.abs(zero - coarse).mean()))
    assert (found.noise > 1e-3) == (dtype == "bfloat16")
    assert found.tolerance == pytest.approx(max(1e-4, 5 * found.noise))
    large = np.concatenate([unpack_logprobs(one) for one in found.self_test.logprobs])
    assert np.abs(large - zero).mean() > 10 * found.tolerance
    tensors, config = agreed.draw_adapter(found.self_test, dtype)
    assert tensor_digest(tensors, config.scaling, dtype) == found.self_test.sha256
    assert len(tensors) == 2 * 14
    assert {tensor.dtype for _, _, tensor in as_held(tensors, config.scaling, dtype)} == {getattr(torch, dtype)}
    assert calibrate(model, pool_document(tiny_model, maxRank=8, rollout={"dtype": dtype})) == found


def test_a_model_that_no_adapter_can_move_clear_of_its_noise_is_refused(tiny_model, half, monkeypatch):
    monkeypatch.setattr(calibration, "_SIZES", (1e-6,))
    with pytest.raises(CalibrationFailed, match=r"set the pool's rollout.dtype to float32"):
        calibrate(half, pool_document(tiny_model, maxRank=8, rollout={"dtype": "bfloat16"}))


@pytest.mark.parametrize("where", ["first", "last"])
def test_models_that_differ_in_any_one_tensor_are_told_apart_by_their_files(tiny_model, tmp_path, where):
    weights = (tiny_model / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(weights[:8], "little")
    names = {name: at["data_offsets"] for name, at in json.loads(weights[8:begin]).items() if name != "__metadata__"}
    found = {agreed.fingerprint(tiny_model)}
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    for first, last in names.values():
        changed = bytearray(weights)
        changed[begin + (first if where == "first" else last - 1)] ^= 1
        (tmp_path / "model.safetensors").write_bytes(changed)
        found.add(agreed.fingerprint(tmp_path))
    assert len(found) == 1 + len(names)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert agreed.fingerprint(tmp_path) == agreed.fingerprint(tiny_model)

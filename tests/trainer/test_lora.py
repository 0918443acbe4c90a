"""An adapted layer as one operation, against PEFT's own forward and autograd."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from marlaas_worker.adapters import as_held, tensor_name
from marlaas_worker.rollout.adapter_groups import add_adapters
from marlaas_worker.trainer.lora import fuse


def adapted(bias: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A layer of 7 to 5 with an adapter of rank 3 and scaling 2, all weights random."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(7, 5, bias=bias)}).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules=["layer"]), model)
    layer: Any = model["layer"]
    nn.init.normal_(layer.lora_B["default"].weight)
    return model.to(dtype)


def outcome(model: Any, hidden: Tensor, upstream: Tensor) -> list[Tensor]:
    layer = model["layer"]
    hidden = hidden.clone().requires_grad_()
    result = layer(hidden)
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    return [result, *torch.autograd.grad(result, [hidden, *weights], upstream)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=["a row of tokens", "two rows"])
def test_output_and_gradients_are_pefts(bias, shape):
    model = adapted(bias)
    hidden, upstream = torch.randn(*shape, 7).double(), torch.randn(*shape, 5).double()
    expected = outcome(model, hidden, upstream)
    fuse(model)
    assert "forward" in vars(model["layer"])
    for ours, pefts in zip(outcome(model, hidden, upstream), expected, strict=True):
        assert torch.allclose(ours, pefts, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_finite_differences():
    model = adapted()
    fuse(model)
    hidden = torch.randn(2, 7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda value: model["layer"](value), hidden)


def half(bias: bool = False) -> Any:
    """The same on a bfloat16 base; its adapter is float32."""
    model = adapted(bias, torch.float32)
    model["layer"].base_layer.to(torch.bfloat16)
    fuse(model)
    return model


def test_a_16_bit_layer_rounds_where_an_engine_rounds():
    """1.02 is 1.0234375 in bfloat16 and 3 times that, in a slot, 3.0625; 259 lies between 258 and 260."""
    model = nn.ModuleDict({"layer": nn.Linear(2, 1, bias=False)}).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=1, lora_alpha=3, target_modules=["layer"]), model)
    layer: Any = model["layer"]
    layer.base_layer.to(torch.bfloat16)
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.tensor([[256.0, 3.0]]))
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.02, 0.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[1.02]]))
    fuse(model)
    hidden = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.00390625, 0.0]]).bfloat16()
    share = 3.140625  # 1.0234375 * 3.0625 = 3.13427734375, between 3.125 and 3.140625
    assert layer(hidden[1:2]).item() == 260.0  # 256 + 3.140625, where bfloat16 has even numbers
    assert layer(hidden[:1]).item() == 264.0  # 260 + 3.140625, not 259 + 3.140625, which would be 262
    assert layer(hidden[2:3]).item() == 3.0
    assert layer(hidden[3:]).item() == 1.015625  # 1 + 0.01226..., where bfloat16 has 128ths
    assert share == float(torch.tensor(1.0234375 * 3.0625).bfloat16())


@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=["a row of tokens", "two rows"])
def test_a_16_bit_layer_computes_what_the_engine_adds_to_its_outputs(shape):
    """Whole numbers, so that no order of summation matters."""
    model = half()
    layer = model["layer"]
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for matrix in (layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            matrix.copy_(torch.randint(-9, 10, matrix.shape, generator=draw))
    hidden = torch.randint(-9, 10, (*shape, 7), generator=draw).bfloat16()
    held = dict.fromkeys(("A", "B"), torch.zeros(0))
    tensors = {
        tensor_name("layer", "A"): layer.lora_A["default"].weight,
        tensor_name("layer", "B"): layer.lora_B["default"].weight,
    }
    for _, kind, matrix in as_held(tensors, 2.0, "bfloat16"):
        held[kind] = matrix
    expected = nn.functional.linear(hidden, layer.base_layer.weight).view(-1, 5)
    add_adapters(expected, hidden.view(-1, 7), [(0, slice(0, None))], [held["A"][None, None]], [held["B"][None, None]])
    assert torch.equal(layer(hidden).view(-1, 5), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_16_bit_layers_adapter_are_float32_and_those_of_autograd_through_what_is_held(bias):
    model = half(bias)
    layer = model["layer"]
    hidden, upstream = torch.randn(2, 3, 7).bfloat16(), torch.randn(2, 3, 5).bfloat16()
    _, slope, *ours = outcome(model, hidden, upstream)
    down, up = (matrix["default"].weight.bfloat16().float().requires_grad_() for matrix in (layer.lora_A, layer.lora_B))
    exact = hidden.float().requires_grad_()
    result = exact @ layer.base_layer.weight.float().T + 2 * exact @ down.T @ up.T
    expected_slope, *expected = torch.autograd.grad(result, [exact, down, up], upstream.float())
    assert slope.dtype == torch.bfloat16
    assert torch.allclose(slope.float(), expected_slope, rtol=1e-2, atol=2e-2)
    for found, value in zip(ours, expected, strict=True):
        assert found.dtype == torch.float32
        assert torch.allclose(found, value, rtol=1e-2, atol=1e-2)


def test_a_frozen_16_bit_layer_computes_what_it_computed_before_and_passes_its_gradient_on():
    layer = nn.Linear(7, 5).requires_grad_(False).bfloat16()
    hidden, upstream = torch.randn(2, 3, 7).bfloat16().requires_grad_(), torch.randn(2, 3, 5).bfloat16()
    expected = layer(hidden)
    (expected_slope,) = torch.autograd.grad(expected, hidden, upstream)
    fuse(nn.ModuleList([layer]))
    found = layer(hidden)
    (slope,) = torch.autograd.grad(found, hidden, upstream)
    assert torch.allclose(found, expected, rtol=1e-2)
    assert torch.allclose(slope, expected_slope, rtol=1e-2, atol=1e-3)


def test_layers_that_are_more_precise_than_their_adapter_are_left_to_peft(monkeypatch):
    model = adapted(dtype=torch.float32)
    model["layer"].base_layer.to(torch.float64)
    fuse(model)
    asked: list[Any] = []
    own = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda layer, hidden: asked.append(hidden) or own(layer, hidden))
    assert model["layer"](torch.randn(2, 7).double()).dtype == torch.float64
    assert len(asked) == 1


def test_without_an_active_adapter_the_layer_is_the_base_layer():
    model = adapted(bias=True)
    fuse(model)
    hidden = torch.randn(3, 7).double()
    model["layer"].set_adapter([])
    assert torch.equal(model["layer"](hidden), model["layer"].base_layer(hidden))

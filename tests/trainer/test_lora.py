"""An adapted layer as one operation, against PEFT's own forward and autograd."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

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
def test_output_and_gradients_are_pefts(bias: bool, shape: tuple[int, ...]) -> None:
    model = adapted(bias)
    hidden, upstream = torch.randn(*shape, 7).double(), torch.randn(*shape, 5).double()
    expected = outcome(model, hidden, upstream)
    fuse(model)
    assert "forward" in vars(model["layer"])
    for ours, pefts in zip(outcome(model, hidden, upstream), expected, strict=True):
        assert torch.allclose(ours, pefts, rtol=1e-12, atol=1e-14)


def test_gradients_are_those_of_finite_differences() -> None:
    model = adapted()
    fuse(model)
    hidden = torch.randn(2, 7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda value: model["layer"](value), hidden)


def test_layers_whose_adapter_has_another_dtype_are_left_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(dtype=torch.float32)
    model["layer"].base_layer.to(torch.bfloat16)
    fuse(model)
    asked: list[Any] = []
    own = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda layer, hidden: asked.append(hidden) or own(layer, hidden))
    assert model["layer"](torch.randn(2, 7).bfloat16()).dtype == torch.bfloat16
    assert len(asked) == 1


def test_without_an_active_adapter_the_layer_is_the_base_layer() -> None:
    model = adapted(bias=True)
    fuse(model)
    hidden = torch.randn(3, 7).double()
    model["layer"].set_adapter([])
    assert torch.equal(model["layer"](hidden), model["layer"].base_layer(hidden))

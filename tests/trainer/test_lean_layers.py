"""Norm, rotary embedding and gate against autograd of the plain formulas; which layers are replaced; what a pass costs."""

import pytest
import torch
import transformers
from bench.gpu.operations import count
from tests.tables import rows
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from marlaas_worker.trainer.lean_layers import Rotary, replace_layers, rms_norm, swiglu

WEIGHT = torch.linspace(0.5, 2, 6, dtype=torch.float64)
ANGLES = torch.linspace(0, 9, 15, dtype=torch.float64).view(1, 5, 3).repeat(1, 1, 2)
FORMS = {
    "norm": (
        lambda one, two: rms_norm(one + two, WEIGHT, 0.1),
        lambda one, two: WEIGHT * (one + two) / ((one + two).square().mean(-1, keepdim=True) + 0.1).sqrt(),
    ),
    "gate": (swiglu, lambda gate, up: gate * gate.sigmoid() * up),
    "rotary": tuple(
        lambda query, key, turn=turn: torch.cat(turn(query, key, ANGLES.cos(), ANGLES.sin()), 1)
        for turn in (Rotary(), apply_rotary_pos_emb)
    ),
}


def outcome(form, given):
    inputs = [one.clone().requires_grad_() for one in given]
    result = form(*inputs)
    upstream = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    return [result, *torch.autograd.grad(result, inputs, upstream)]


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_those_of_autograd(name):
    given = torch.randn(2, 1, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(*(outcome(form, given) for form in FORMS[name]), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "replaced"), rows(__file__, "replaced_layers"))
def test_layers_that_compute_the_same_bits_are_replaced_and_no_others(name, replaced):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=61, num_hidden_layers=2, pad_token_id=0, **sizes)
    model = getattr(transformers, f"{name}Model")(config).bfloat16().eval().requires_grad_(False)
    for weight in model.parameters():
        weight += torch.linspace(-0.2, 0.2, weight.numel()).view_as(weight)
    before = model(torch.arange(20)[None]).last_hidden_state
    assert list(replace_layers(model).values()) == replaced
    assert torch.equal(model(torch.arange(20)[None]).last_hidden_state, before)


def test_a_pass_of_an_8b_has_at_most_6500_operations_and_keeps_at_most_136_kib_a_token_and_layer():
    one, two = (count("8b", 2, 2048, num_layers) for num_layers in (1, 2))
    assert 31 * two.operations.total() - 30 * one.operations.total() < 6500
    assert 2 * two.kept_bytes - one.kept_bytes < 136 * 1024

"""An adapted layer and the output head, against PEFT's own forward and autograd."""

from dataclasses import dataclass, replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from marlaas_worker.adapters import AdapterConfig, as_held, tensor_name
from marlaas_worker.rollout.adapter_groups import add_adapters, group_rows, stacked_adapters
from marlaas_worker.trainer import head
from marlaas_worker.trainer.head import token_logprobs, token_logprobs_and_entropies, token_logprobs_and_ranks
from marlaas_worker.trainer.lora import ActiveAdapter, adapt_layers, initial_weights, new_adapter


@dataclass(frozen=True)
class Adapted:
    model: nn.ModuleDict
    active: ActiveAdapter
    down: nn.Parameter
    up: nn.Parameter

    @property
    def layer(self):
        return self.model["layer"]


def on(layer, rank, alpha, dtype):
    made = new_adapter("one", AdapterConfig(rank, alpha), {"layer": layer}, torch.device("cpu"))
    if dtype != torch.float32:
        parameters = {name: nn.Parameter(value.to(dtype)) for name, value in made.parameters.items()}
        made = replace(made, parameters=parameters, layers={"layer": tuple(parameters.values())})
    down, up = made.parameters.values()
    model, active = nn.ModuleDict({"layer": layer}).requires_grad_(False), ActiveAdapter()
    active.adapter = made
    adapt_layers(model, {"layer": layer}, active)
    return Adapted(model, active, down, up)


def adapted(bias=False, dtype=torch.float64, base=None):
    """A layer of 7 to 5 with an adapter of rank 3 and scaling 2, all weights random."""
    torch.manual_seed(0)
    made = on(nn.Linear(7, 5, bias=bias).to(dtype).to(base or dtype), 3, 6, dtype)
    for matrix in (made.down, made.up):
        nn.init.normal_(matrix)
    return made


def outcome(made, hidden, upstream):
    hidden = hidden.clone().requires_grad_()
    result = made.layer(hidden)
    return [result, *torch.autograd.grad(result, [hidden, made.down, made.up], upstream)]


def outcome_of_peft(made, hidden, upstream):
    layer = nn.Linear(7, 5, bias=made.layer.bias is not None).double()
    layer.load_state_dict(made.layer.state_dict())
    model = nn.ModuleDict({"layer": layer}).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules=["layer"]), model)
    matrices = [getattr(model["layer"], kind)["default"].double().weight for kind in ("lora_A", "lora_B")]
    with torch.no_grad():
        for matrix, value in zip(matrices, (made.down, made.up), strict=True):
            matrix.copy_(value)
    hidden = hidden.clone().requires_grad_()
    result = model["layer"](hidden)
    return [result, *torch.autograd.grad(result, [hidden, *matrices], upstream)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=["a row of tokens", "two rows"])
def test_output_and_gradients_are_pefts(bias, shape):
    made = adapted(bias)
    hidden, upstream = torch.randn(*shape, 7).double(), torch.randn(*shape, 5).double()
    expected = outcome_of_peft(made, hidden, upstream)
    for ours, pefts in zip(outcome(made, hidden, upstream), expected, strict=True):
        assert torch.allclose(ours, pefts, rtol=1e-12, atol=1e-14)


def half():
    return adapted(dtype=torch.float32, base=torch.bfloat16)


def test_adapters_are_float32_while_another_thread_loads_a_16_bit_model():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as transformers does meanwhile, for the whole process
    try:
        made = new_adapter("one", AdapterConfig(2, 4), {"x": nn.Linear(4, 4)}, torch.device("cpu")).parameters
        found = [*made.values(), *initial_weights(made, 1, "policy").values()]
    finally:
        torch.set_default_dtype(before)
    assert {value.dtype for value in found} == {torch.float32}


def test_a_16_bit_layer_rounds_where_an_engine_rounds():
    """1.02 is 1.0234375 in bfloat16 and 3 times that, in a slot, 3.0625; 259 lies between 258 and 260."""
    made = on(nn.Linear(2, 1, bias=False).bfloat16(), 1, 3, torch.float32)
    layer = made.layer
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[256.0, 3.0]]))
        made.down.copy_(torch.tensor([[1.02, 0.0]]))
        made.up.copy_(torch.tensor([[1.02]]))
    hidden = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.00390625, 0.0]]).bfloat16()
    share = 3.140625  # 1.0234375 * 3.0625 = 3.13427734375, between 3.125 and 3.140625
    assert layer(hidden[1:2]).item() == 260.0  # 256 + 3.140625, where bfloat16 has even numbers
    assert layer(hidden[:1]).item() == 264.0  # 260 + 3.140625, not 259 + 3.140625, which would be 262
    assert layer(hidden[2:3]).item() == 3.0
    assert layer(hidden[3:]).item() == 1.015625  # 1 + 0.01226..., where bfloat16 has 128ths
    assert share == float(torch.tensor(1.0234375 * 3.0625).bfloat16())


def test_a_16_bit_layer_computes_what_the_engine_adds_to_its_outputs():
    """Whole numbers, so that no order of summation matters."""
    made = half()
    layer = made.layer
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for matrix in (layer.weight, made.down, made.up):
            matrix.copy_(torch.randint(-9, 10, matrix.shape, generator=draw))
    hidden = torch.randint(-9, 10, (2, 3, 7), generator=draw).bfloat16()
    held = dict.fromkeys(("A", "B"), torch.zeros(0))
    tensors = {tensor_name("layer", "A"): made.down, tensor_name("layer", "B"): made.up}
    for _, kind, matrix in as_held(tensors, 2.0, "bfloat16"):
        held[kind] = matrix
    expected = nn.functional.linear(hidden, layer.weight).view(-1, 5)
    rows = group_rows(torch.zeros(len(expected), dtype=torch.long))
    adapters = stacked_adapters([held["A"][None, None]], [held["B"][None, None]])
    add_adapters(expected, hidden.view(-1, 7), rows, adapters)
    assert torch.equal(layer(hidden).view(-1, 5), expected)


def test_gradients_of_a_16_bit_layers_adapter_are_float32_and_those_of_autograd_through_what_is_held():
    made = half()
    hidden, upstream = torch.randn(2, 3, 7).bfloat16(), torch.randn(2, 3, 5).bfloat16()
    _, slope, *ours = outcome(made, hidden, upstream)
    down, up = (matrix.detach().bfloat16().float().requires_grad_() for matrix in (made.down, made.up))
    exact = hidden.float().requires_grad_()
    result = exact @ made.layer.weight.float().T + 2 * exact @ down.T @ up.T
    expected_slope, *expected = torch.autograd.grad(result, [exact, down, up], upstream.float())
    assert slope.dtype == torch.bfloat16
    assert torch.allclose(slope.float(), expected_slope, rtol=1e-2, atol=2e-2)
    for found, value in zip(ours, expected, strict=True):
        assert found.dtype == torch.float32
        assert torch.allclose(found, value, rtol=1e-2, atol=1e-2)


def plain(hidden, weight, tokens, temperature):
    return (hidden @ weight.T / temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [1, 3, 1 << 20], ids=["row by row", "three rows", "at once"])
def test_logprobs_entropies_and_their_gradients_are_those_of_autograd(monkeypatch, temperature, rows):
    monkeypatch.setattr(head, "chunk_rows", lambda *_: rows)
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, generator=draw, dtype=torch.float64)
    tokens = torch.randint(13, (11,), generator=draw)
    upstreams = torch.randn(2, 11, generator=draw, dtype=torch.float64)
    alone = token_logprobs(hidden, weight, tokens, temperature)
    found = token_logprobs_and_entropies(hidden, weight, tokens, temperature)
    log_softmax = (hidden @ weight.T / temperature).log_softmax(-1)
    expected = plain(hidden, weight, tokens, temperature), -(log_softmax.exp() * log_softmax).sum(-1)
    assert torch.equal(found[0], alone)
    ranked, best = token_logprobs_and_ranks(hidden, weight, tokens, temperature)
    assert torch.equal(*(torch.autograd.grad(one.sum(), hidden, retain_graph=True)[0] for one in (ranked, alone)))
    assert best.bool().tolist() == ((hidden @ weight.T).argmax(-1) == tokens).tolist()
    by_hand = token_logprobs_and_ranks(torch.eye(3), torch.eye(3), torch.tensor([0, 2, 2]), temperature)[1]
    assert by_hand.tolist() == [1, 0, 1]
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))
    for ours, theirs, part in ((found, expected, upstreams), ((alone,), expected[:1], upstreams[:1])):
        slopes = [torch.autograd.grad(one, hidden, tuple(part), retain_graph=True)[0] for one in (ours, theirs)]
        assert torch.allclose(*slopes, rtol=1e-11, atol=1e-13)


def test_a_half_precision_head_has_logprobs_and_slopes_in_single_precision():
    """Against autograd in float32 through the rounded logits: a softmax rounded to bfloat16 would be off by a few parts in a thousand of each summand."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 16, generator=draw).bfloat16().requires_grad_()
    weight, tokens = torch.randn(200, 16, generator=draw).bfloat16(), torch.tensor([3, 1, 4, 1, 5])
    upstream = torch.tensor([0.3, -1.7, 2.0, 1e-3, 5.0])
    logprobs = token_logprobs(hidden, weight, tokens, 0.7)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, plain((hidden @ weight.T).float(), torch.eye(200), tokens, 0.7))
    (slope,) = torch.autograd.grad(logprobs, hidden, upstream)
    exact = hidden.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(plain(exact, weight.float(), tokens, 0.7), exact, upstream)
    assert slope.dtype == torch.bfloat16
    assert torch.allclose(slope.float(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))

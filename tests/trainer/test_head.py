"""The output head against plain autograd."""

import pytest
import torch

from marlaas_worker.trainer import head
from marlaas_worker.trainer.head import token_logprobs, token_logprobs_and_entropies


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

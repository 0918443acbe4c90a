"""Norms by vLLM's compiled CPU kernels compute what vLLM's tensor operations compute; products with small weights are torch's."""

import pytest
import torch
from torch import nn

EPSILON = 1e-5
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def kernels():
    """Imported here: every worker imports this file when it collects, and vLLM takes seconds."""
    pytest.importorskip("vllm")
    from vllm import ir

    from marlaas_worker.rollout import vllm_cpu

    torch.manual_seed(0)
    vllm_cpu.register()
    priority = [vllm_cpu.PROVIDER, "native"]
    with ir.ops.rms_norm.set_priority(priority), ir.ops.fused_add_rms_norm.set_priority(priority):
        yield vllm_cpu


@pytest.fixture
def ir(kernels):
    return kernels.ir


def assert_normed(found, x, weight, tolerance):
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(1, 64), (17, 576), (3, 4, 64)])
def test_a_norm_is_its_formula_and_a_rows_does_not_depend_on_its_batch(kernels, ir, shape, dtype, tolerance):
    x, residual, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    found = ir.ops.rms_norm(x, weight, EPSILON)
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == kernels.PROVIDER
    assert_normed(found, x, weight, tolerance / 2)
    assert all(torch.equal(ir.ops.rms_norm(x[row][None], weight, EPSILON)[0], found[row]) for row in range(len(x)))
    found, sums = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(sums, x + residual)
    assert_normed(found, x + residual, weight, tolerance)


@pytest.mark.parametrize(
    "x",
    [torch.arange(96.0).view(4, 24), torch.arange(256.0).view(64, 4).T, torch.arange(512.0).view(4, 128)[:, :64]],
    ids=["a width that is no multiple of 16", "a transposed input", "part of a wider row"],
)
def test_what_the_kernel_cannot_compute_is_computed_by_tensor_operations(ir, x):
    weight = torch.randn(x.shape[-1])
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == "native"
    assert_normed(ir.ops.rms_norm(x, weight, EPSILON), x, weight, 1e-5)
    assert ir.ops.fused_add_rms_norm.dispatch(x, x, weight, EPSILON).provider == "native"


@pytest.mark.parametrize("more", [0, 1])
def test_a_layer_with_a_small_weight_is_multiplied_by_torch_and_a_large_one_as_vllm_chooses(kernels, more):
    layer = nn.Linear(64, kernels.SMALL // 64 + more, bias=False).requires_grad_(requires_grad=False)
    x, expected = torch.randn(3, 64), layer.weight.clone()
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    assert (layer.cpu_linear is nn.functional.linear) == (more == 0)
    torch.testing.assert_close(method.apply(layer, x), x @ expected.T)

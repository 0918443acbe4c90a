"""Norms by vLLM's compiled CPU kernels compute what vLLM's tensor operations compute; products with small weights are torch's."""

import contextlib
import sys

import pytest
import torch

pytest.importorskip("vllm")

from torch import nn
from vllm import ir
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from marlaas_worker.rollout import vllm_cpu_kernels, vllm_extension
from marlaas_worker.rollout.vllm_cpu_kernels import PROVIDER, SMALL

EPSILON = 1e-5


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    vllm_cpu_kernels.register()
    with (
        ir.ops.rms_norm.set_priority([PROVIDER, "native"]),
        ir.ops.fused_add_rms_norm.set_priority([PROVIDER, "native"]),
    ):
        yield


def normed(x, weight):
    """The formula in float64."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(1, 64), (17, 576), (3, 4, 64)])
def test_a_norm_is_its_formula(shape, dtype, tolerance):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    got = ir.ops.rms_norm(x, weight, EPSILON)
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == PROVIDER
    torch.testing.assert_close(got.double(), normed(x, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_a_norm_with_a_residual_is_its_formula(dtype, tolerance):
    x, residual, weight = torch.randn(17, 576).to(dtype), torch.randn(17, 576).to(dtype), torch.randn(576).to(dtype)
    got, sums = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(sums, x + residual)
    torch.testing.assert_close(got.double(), normed(x + residual, weight), rtol=tolerance, atol=tolerance)


def test_a_rows_norm_does_not_depend_on_its_batch():
    x, weight = torch.randn(64, 576), torch.randn(576)
    together = ir.ops.rms_norm(x, weight, EPSILON)
    assert all(
        torch.equal(ir.ops.rms_norm(row[None], weight, EPSILON)[0], one) for row, one in zip(x, together, strict=True)
    )


@pytest.mark.parametrize(
    "x",
    [torch.arange(96.0).view(4, 24), torch.arange(256.0).view(64, 4).T, torch.arange(512.0).view(4, 128)[:, :64]],
    ids=["a width that is no multiple of 16", "a transposed input", "part of a wider row"],
)
def test_what_the_kernel_cannot_compute_is_computed_by_tensor_operations(x):
    weight = torch.randn(x.shape[-1])
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == "native"
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, EPSILON).double(), normed(x, weight), rtol=1e-5, atol=1e-6)
    assert ir.ops.fused_add_rms_norm.dispatch(x, x, weight, EPSILON).provider == "native"


@pytest.mark.parametrize(("rows", "small"), [(SMALL // 64, True), (SMALL // 64 + 1, False)])
def test_a_layer_with_a_small_weight_is_multiplied_by_torch_and_a_large_one_as_vllm_chooses(rows, small):
    layer = nn.Linear(64, rows, bias=False).requires_grad_(requires_grad=False)
    x, expected = torch.randn(3, 64), layer.weight.clone()
    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    assert (layer.cpu_linear is nn.functional.linear) == small
    torch.testing.assert_close(method.apply(layer, x), x @ expected.T)


@pytest.mark.parametrize("fails", [False, True])
def test_numbas_llvm_binding_is_hidden_only_while_vllm_looks_through_all_modules(fails):
    import llvmlite.binding.ffi

    def register():
        seen.extend(name for name in sys.modules if name.startswith("llvmlite"))
        if fails:
            raise ValueError("a kernel is missing")

    seen: list[str] = []
    with pytest.raises(ValueError, match="a kernel is missing") if fails else contextlib.nullcontext():
        vllm_extension._without_llvm(register)()
    assert seen == []
    assert sys.modules["llvmlite.binding.ffi"] is llvmlite.binding.ffi

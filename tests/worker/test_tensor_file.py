"""The safetensors file, against the library's own."""

import pytest
import torch
from safetensors.torch import load, save

from marlaas_worker.tensor_file import raw, write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"b.x": (3, 4), "a": (5,), "layers.10.w": (1, 1), "layers.2.w": (0, 7), "umläut": (2, 3)}
    return {
        f"{name}/{dtype}": (100 * torch.rand(shape, generator=draw)).to(dtype)
        for dtype in reversed(DTYPES)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_the_library(metadata: dict[str, str] | None) -> None:
    made = tensors()
    assert write_tensors(made, metadata) == save(made, metadata=metadata)
    assert write_tensors(dict(reversed(made.items())), metadata) == save(made, metadata=metadata)


def test_parts_of_one_buffer_and_transposed_tensors_are_written_by_value() -> None:
    flat = torch.arange(12.0)
    made = {"left": flat[:6].view(2, 3), "right": flat[6:].view(3, 2).T}
    found = load(write_tensors(made))
    assert all(torch.equal(found[name], value) for name, value in made.items())


def test_a_dtype_that_adapters_never_have_is_refused() -> None:
    with pytest.raises(KeyError):
        write_tensors({"a": torch.zeros(2, dtype=torch.complex64)})


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4)
    raw(tensor)[0] = 1
    assert bool(tensor.any())

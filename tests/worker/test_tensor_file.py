"""The safetensors file, against the library's own."""

import torch
from safetensors.torch import load, save

from marlaas_worker.tensor_file import write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def tensors():
    draw = torch.Generator().manual_seed(1)
    shapes = {"b.x": (3, 4), "a": (5,), "layers.10.w": (1, 1), "layers.2.w": (0, 7), "umläut": (2, 3)}
    return {
        f"{name}/{dtype}": (100 * torch.rand(shape, generator=draw)).to(dtype)
        for dtype in reversed(DTYPES)
        for name, shape in shapes.items()
    }


def test_the_bytes_are_those_of_the_library():
    made = tensors()
    for metadata in (None, {"format": "pt"}):
        assert write_tensors(made, metadata) == save(made, metadata=metadata)
        assert write_tensors(dict(reversed(made.items())), metadata) == save(made, metadata=metadata)


def test_parts_of_one_buffer_and_transposed_tensors_are_written_by_value():
    flat = torch.arange(12.0)
    made = {"left": flat[:6].view(2, 3), "right": flat[6:].view(3, 2).T}
    found = load(write_tensors(made))
    assert all(torch.equal(found[name], value) for name, value in made.items())

"""Writes tensors in the safetensors format, with the same bytes as the library.

The library copies every tensor twice and compares the addresses of all. This takes several times as long as one copy of an
adapter's tensors. Reading is left to the library.
"""

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

# name in the header, and rank in the order of the file: the library writes the widest dtypes first
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_ORDER = {dtype: place for place, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.uint8))}
_ALIGNMENT = 8


def write_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file with these tensors, by name; equal tensors give equal bytes, in whatever order they come.

    metadata: texts for the file's header; None: none.

    Raises:
        KeyError: a dtype other than float32, bfloat16, float16 and uint8.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    buffers, end = [], 0
    for name, tensor in ordered:
        buffers.append(raw(tensor))
        begin, end = end, end + buffers[-1].nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((len(text).to_bytes(8, "little"), text, *(buffer.data for buffer in buffers)))


def raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous and in host memory."""
    found: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found

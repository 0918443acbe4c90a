"""Serialization of token ids and logprobs: little-endian int32 and float32 bytes, four bytes per token.

Bytes keep messages smaller than lists do, and hashable. A float32 logprob survives the round trip bit for bit.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def pack_ids(ids: Iterable[int]) -> bytes:
    """Serialize token ids [T]."""
    return np.fromiter(ids, dtype=np.int32).astype("<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Deserialize token ids [T]."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Serialize logprobs [T]; they are rounded to float32."""
    return np.fromiter(logprobs, dtype=np.float64).astype("<f4").tobytes()


def unpack_logprobs(data: bytes) -> npt.NDArray[np.float32]:
    """Deserialize logprobs [T]."""
    return np.frombuffer(data, dtype="<f4")

"""Token ids and logprobs as they travel: little-endian int32 and float32 bytes, four bytes a token.

bytes rather than lists keep messages small, hashable and exact: a float32 logprob comes back bit for bit.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids [T] to bytes."""
    return np.fromiter(ids, dtype=np.int32).astype("<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Bytes to token ids [T]."""
    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Logprobs [T] to bytes."""
    return np.fromiter(logprobs, dtype=np.float64).astype("<f4").tobytes()


def unpack_logprobs(data: bytes) -> npt.NDArray[np.float32]:
    """Bytes to logprobs [T]."""
    return np.frombuffer(data, dtype="<f4")

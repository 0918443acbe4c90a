"""Returns freed memory to the system, because a container's limit counts it.

Objects may have 256 KiB each and are parsed as whole pages. glibc keeps what was freed among the small parts that stay,
and raises the size from which it maps memory of its own each time that such memory is freed.
"""

import asyncio
import ctypes

TRIM_S = 5.0
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 128 << 10


def configure() -> None:
    """Keep glibc's threshold for memory of its own mapping; without effect with another C library."""
    if set_option := _function("mallopt"):
        set_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


async def trim() -> None:
    """Return free pages of the heap every `TRIM_S` seconds, until cancelled."""
    if give_back := _function("malloc_trim"):
        while True:
            await asyncio.sleep(TRIM_S)
            await asyncio.to_thread(give_back, 0)


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None)

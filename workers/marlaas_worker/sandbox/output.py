"""Output of a child process or fork server: stdout and stderr, from one pipe.

It is read as it comes, and its tail is kept to explain faults. A process that prints much is slowed down.
"""

import asyncio
import os

FREE_BYTES = 256 << 10
KEPT_BYTES = 4000
_PART_BYTES = 64 << 10
_PAUSE_S = 0.05


class Output:
    """Reads a pipe in the background, by the event loop, and keeps the last `KEPT_BYTES`.

    After `FREE_BYTES` it reads only `_PART_BYTES` every `_PAUSE_S`, so that the pipe fills and blocks its writer.

    Args:
        descriptor: read end of the pipe; closed at the end of the output, or by `close`.

    Attributes:
        num_bytes: bytes read so far.
    """

    def __init__(self, descriptor: int) -> None:
        self.num_bytes = 0
        self._descriptor = descriptor
        self._tail = b""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        self._listen()

    def text(self) -> str:
        """Return the last `KEPT_BYTES` of the output; if bytes before them were dropped, the text begins with their number."""
        tail = self._tail.decode(errors="replace").strip()
        cut = self.num_bytes - len(self._tail)
        return f"[{cut} bytes cut] …{tail}" if cut > 0 else tail

    async def wait_for_text(self, words: bytes, timeout_s: float) -> None:
        """Wait until the last `KEPT_BYTES` of the output contain `words`, the timeout ends, or the pipe closes."""
        try:
            async with asyncio.timeout(timeout_s):
                while words not in self._tail and self._descriptor >= 0:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Read what is left, then close the pipe."""
        if self._descriptor < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)
        self._read_part()
        self._close_pipe()

    def _listen(self) -> None:
        self._loop.add_reader(self._descriptor, self._on_readable)

    def _on_readable(self) -> None:
        if not self._read_part():
            self._loop.remove_reader(self._descriptor)
            self._close_pipe()
        elif self.num_bytes > FREE_BYTES:
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_S, self._listen)

    def _read_part(self) -> bool:
        """Read at most `_PART_BYTES`; return False at the end of the output."""
        try:
            part = os.read(self._descriptor, _PART_BYTES)
        except BlockingIOError:
            return True
        self.num_bytes += len(part)
        self._tail = (self._tail + part)[-KEPT_BYTES:]
        self._changed.set()
        return bool(part)

    def _close_pipe(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._changed.set()

"""Standard input, output and error of the command: opened if they are closed, and output that may lose its reader."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_NUM_STANDARD = 3


def open_closed_descriptors() -> None:
    """Open the null device for each of the descriptors 0 to 2 that is closed, as cron and service managers leave them.

    Otherwise the next files and sockets would get these numbers, and libraries would write to them.
    """
    for number in range(_NUM_STANDARD):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


class LossyOutput:
    """A text file that drops what it cannot write, because its reader has gone (`| head`) or its terminal is closed.

    `is_lost` is set then, and the descriptor becomes the null device, so that nothing else fails on it.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.is_lost = False

    def write(self, text: str) -> int:
        """Write the text, or drop it; return its length."""
        if not self.is_lost:
            with self._losing():
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        if not self.is_lost:
            with self._losing():
                self._file.flush()

    def isatty(self) -> bool:
        """Return whether the file is a terminal that is still open."""
        return not self.is_lost and self._file.isatty()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    @property
    def encoding(self) -> str:
        """The file's encoding."""
        return self._file.encoding

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.is_lost = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)

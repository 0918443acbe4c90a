"""Numbers that a service has given as a judge, by prompt: the same prompt is paid for once in a sandbox, although each episode is a process."""

import contextlib
import hashlib
import mmap
import os
import stat
import struct
import tempfile
from pathlib import Path

MAX_BYTES = 32 << 20
_NUMBER = struct.Struct("<d")
_DIGEST_BYTES = 32
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Judged:
    """Records of 40 bytes in a file: the prompt's digest, and the number. A full file takes no more.

    The file lies in the folder for temporary files of the process that creates the object; all processes that this forks share it. There is
    none if others may write to that folder.

    Args:
        judge: what identifies the judge, such as its address and model.
    """

    def __init__(self, *judge: object) -> None:
        self._judge = repr(judge).encode()
        folder = Path(tempfile.gettempdir())
        found = folder.stat()
        is_own = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
        self._file = folder / f"judged-{hashlib.sha256(self._judge).hexdigest()[:16]}" if is_own else None

    def find(self, prompt: str) -> float | None:
        """Return the number that the judge gave for a prompt; None if it is not known."""
        digest = self._digest(prompt)
        with contextlib.suppress(OSError, ValueError):  # there is no file yet, or it is empty
            if self._file is not None:
                with self._file.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as known:
                    at = known.find(digest)
                    if at >= 0 and at + _DIGEST_BYTES + _NUMBER.size <= len(known):
                        return float(_NUMBER.unpack_from(known, at + _DIGEST_BYTES)[0])
        return None

    def add(self, prompt: str, number: float) -> None:
        """Keep the number of a prompt, if there is room."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                try:
                    if os.fstat(file).st_size < MAX_BYTES:
                        os.write(file, self._digest(prompt) + _NUMBER.pack(number))
                finally:
                    os.close(file)

    def _digest(self, prompt: str) -> bytes:
        return hashlib.sha256(self._judge + b"\0" + prompt.encode(errors="surrogatepass")).digest()

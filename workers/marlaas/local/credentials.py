"""How the roles of a run get their NATS credentials: each its own, in memory that has no name, inherited as an open file.

Nothing secret is in an environment variable, on a command line or on the disk: the code of an environment runs as the same person as
its supervisor, and would find it there. What remains on one machine is in `docs/bus.md`.
"""

import asyncio
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from marlaas_api.bus_users import BusKeys, BusUser, mint, renew_at

_LOOK_S = 60.0
_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class Handed:
    """A credentials file for a process that inherits `descriptors`; None: it needs none."""

    path: Path | None
    descriptors: tuple[int, ...] = ()


class CredentialSource(Protocol):
    """Where roles get theirs."""

    def of(self, user: BusUser) -> Handed:
        """The user's credentials, good for as long as the run lasts."""
        ...


@dataclass(frozen=True, slots=True)
class OneForAll:
    """A server that is not ours: every role, sandboxes too, connects with what the person gave, if anything."""

    path: Path | None

    def of(self, user: BusUser) -> Handed:
        """The same for everybody."""
        return Handed(self.path)


@dataclass(slots=True, eq=False)
class _File:
    descriptor: int
    renew_at: float


@dataclass(slots=True)
class Issuer:
    """Makes credentials with keys that live as long as the runner, and renews them where their readers look."""

    keys: BusKeys
    now: Callable[[], float] = time.time
    _files: dict[BusUser, _File] = field(default_factory=dict)

    def of(self, user: BusUser) -> Handed:
        """The user's own."""
        file = self._files.get(user)
        if file is None:
            file = self._files[user] = _File(_nameless(), 0.0)
            self._write(user, file)
        return Handed(Path(f"/dev/fd/{file.descriptor}"), (file.descriptor,))

    def renew(self) -> None:
        """Write anew what is due."""
        for user, file in self._files.items():
            if self.now() >= file.renew_at:
                self._write(user, file)

    async def keep_fresh(self) -> None:
        """Renew for ever; by the wall clock, which goes on while a laptop sleeps."""
        while True:
            self.renew()
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Forget everything; who has inherited a file keeps it."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _write(self, user: BusUser, file: _File) -> None:
        """In place, in one write: a reader that sees half of it is rejected, and reads again."""
        now = self.now()
        text = mint(self.keys, user, now).encode()
        os.pwrite(file.descriptor, text, 0)
        os.ftruncate(file.descriptor, len(text))
        file.renew_at = renew_at(user, now)


def keep_to_oneself() -> None:
    """Keep other processes of this person from reading this one's memory and open files, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _nameless() -> int:
    """An open file that no path leads to, but through whoever holds it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("marlaas-credentials")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

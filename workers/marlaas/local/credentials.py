"""NATS credentials of a run's roles: each role inherits its own as an open file without a path.

No secret is in an environment variable, on a command line or on disk. Code of an environment runs as the same user
as its supervisor and could read it there. `docs/reference/bus.md` lists the remaining risks on one machine.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from marlaas_api.bus_users import BusKeys, BusUser, mint, renew_at
from marlaas_api.prctl import let_others_look

_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class Handed:
    """A credentials file for a process that inherits `descriptors`. `path` is None if it needs no credentials."""

    path: Path | None
    descriptors: tuple[int, ...] = ()


class CredentialSource(Protocol):
    """Source of the roles' credentials."""

    def of(self, user: BusUser) -> Handed:
        """Return the user's credentials, valid until `forget`."""
        ...

    def forget(self, user: BusUser) -> None:
        """Stop renewing the credentials of a user without processes."""
        ...


@dataclass(frozen=True, slots=True)
class OneForAll:
    """Credentials for an external server: every role, also sandboxes, connects with the file of `--creds`, if any."""

    path: Path | None

    def of(self, user: BusUser) -> Handed:
        """Return the same file for every user."""
        return Handed(self.path)

    def forget(self, user: BusUser) -> None:
        """Do nothing: nothing is renewed here."""


@dataclass(slots=True, eq=False)
class _File:
    descriptor: int
    renew_at: float


@dataclass(slots=True)
class LocalIssuer:
    """Issues credentials with keys that are valid for one run, and renews them in place."""

    keys: BusKeys
    now: Callable[[], float] = time.time
    _files: dict[BusUser, _File] = field(default_factory=dict)

    def of(self, user: BusUser) -> Handed:
        """Return the user's own credentials; create them at the first call."""
        file = self._files.get(user)
        if file is None:
            file = self._files[user] = _File(_nameless(), 0.0)
            self._write(user, file)
        return Handed(Path(f"/dev/fd/{file.descriptor}"), (file.descriptor,))

    def forget(self, user: BusUser) -> None:
        """Close the user's file, if there is one."""
        if (file := self._files.pop(user, None)) is not None:
            os.close(file.descriptor)

    def renew(self) -> None:
        """Rewrite the credentials that are due for renewal."""
        for user, file in self._files.items():
            if self.now() >= file.renew_at:
                self._write(user, file)

    async def keep_fresh(self) -> None:
        """Renew credentials in an endless loop. Uses the wall clock, which continues while a laptop sleeps."""
        while True:
            self.renew()
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Close all files. Processes that inherited a file keep it."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _write(self, user: BusUser, file: _File) -> None:
        """Rewrite the file in place with one write. The server rejects a half-written file, and the role reads it again."""
        now = self.now()
        text = mint(self.keys, user, now).encode()
        os.pwrite(file.descriptor, text, 0)
        os.ftruncate(file.descriptor, len(text))
        file.renew_at = renew_at(user, now)


def keep_to_oneself() -> None:
    """Prevent other processes of this user from reading this process's memory and open files (Linux only)."""
    let_others_look(False)


def _nameless() -> int:
    """Return the descriptor of an open file without a path."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("marlaas-credentials")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

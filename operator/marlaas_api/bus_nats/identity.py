"""The client's identity: a credentials file, read for every connection, so that renewal needs no notification.

This module has no connection and does not import nats-py. Its errors show no secret of the file.
"""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marlaas_api.bus import BusRefused
from marlaas_api.bus_users.nkey import sign
from marlaas_api.bus_users.tokens import Credentials, read_credentials
from marlaas_api.errors import Permanent

DEFAULT_PREFIX = "_INBOX"


@dataclass(slots=True)
class Identity:
    """The user of a credentials file. path: may be an inherited descriptor (`/dev/fd/3`). now: unix seconds."""

    path: Path
    now: Callable[[], float] = time.time
    _used: Credentials | None = None

    def read(self) -> Credentials:
        """Read the credentials file. Raises BusRefused if it is missing or invalid."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(0)
                return read_credentials(file.readall().decode(errors="replace"))
        except FileNotFoundError:
            raise BusRefused(f"there is no NATS credentials file {self.path}") from None
        except (OSError, Permanent) as error:
            raise BusRefused(f"the NATS credentials file {self.path} cannot be used: {error}") from None

    def inbox_prefix(self) -> str:
        """Return the prefix on which this user may receive answers. Raises BusRefused."""
        inboxes = self.read().inboxes
        return inboxes[0] if inboxes else DEFAULT_PREFIX

    def sign(self, nonce: str) -> bytes:
        """Read the credentials and sign the server's challenge with them. Raises BusRefused."""
        self._used = self.read()
        return base64.b64encode(sign(self._used.seed, nonce.encode()))

    def token(self) -> bytes:
        """Return the token of the credentials that signed last."""
        assert self._used is not None, "nats-py signs first"
        return self._used.token.encode()

    def complaint(self) -> str:
        """Return the probable reason why a server rejected the credentials, and advice."""
        try:
            credentials = self.read()
        except BusRefused as error:
            return str(error)
        if credentials.expires_at is not None and credentials.expires_at <= self.now():
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(credentials.expires_at))
            return (
                f"its credentials (user {credentials.name}) expired at {when}; the operator or `marlaas run`, which issued them, renews "
                f"them while it runs: check that it runs, or write new credentials to {self.path}"
            )
        return (
            f"its credentials (user {credentials.name}, {self.path}) are not signed with this server's keys: they belong to another "
            "installation, or the keys were replaced; get new credentials"
        )

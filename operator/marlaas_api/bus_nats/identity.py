"""As whom to connect: a credentials file, read anew for every connection, so that who renews it need tell nobody.

Knows neither connections nor nats-py. What it says of a file shows no secret.
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
    """The user of a credentials file. The path may be an inherited descriptor (`/dev/fd/3`). `now`: unix seconds."""

    path: Path
    now: Callable[[], float] = time.time
    _used: Credentials | None = None

    def read(self) -> Credentials:
        """What the file says now. Raises BusRefused: there is none, or it is something else."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(0)
                return read_credentials(file.readall().decode(errors="replace"))
        except FileNotFoundError:
            raise BusRefused(f"there is no NATS credentials file {self.path}") from None
        except (OSError, Permanent) as error:
            raise BusRefused(f"the NATS credentials file {self.path} cannot be used: {error}") from None

    def inbox_prefix(self) -> str:
        """Where this user may hear answers. Raises BusRefused."""
        inboxes = self.read().inboxes
        return inboxes[0] if inboxes else DEFAULT_PREFIX

    def sign(self, nonce: str) -> bytes:
        """Answer the server's challenge as the user of now. Raises BusRefused."""
        self._used = self.read()
        return base64.b64encode(sign(self._used.seed, nonce.encode()))

    def token(self) -> bytes:
        """The token of who has just signed."""
        assert self._used is not None, "nats-py signs first"
        return self._used.token.encode()

    def complaint(self) -> str:
        """Why a server may have rejected it, and what to do."""
        try:
            credentials = self.read()
        except BusRefused as error:
            return str(error)
        if credentials.expires_at is not None and credentials.expires_at <= self.now():
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(credentials.expires_at))
            return (
                f"its credentials (user {credentials.name}) expired at {when}: who made them (the operator, or `marlaas run`) renews them "
                f"while it runs; see that it does, or put newer ones into {self.path}"
            )
        return (
            f"its credentials (user {credentials.name}, {self.path}) are not of this server's keys: they are another installation's, or the "
            "keys were replaced; get new ones"
        )

"""Connection parameters of NATS."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas_api.bus_nats.identity import DEFAULT_PREFIX, Identity

_RECONNECT_S = 0.25
_PING_S = 10.0


@dataclass(frozen=True, slots=True)
class Dial:
    """Address and identity of a connection.

    creds: a NATS credentials file, read again at every reconnect. inbox_prefix: None is the prefix that the credentials
    allow. answer_s: limit of every call.
    """

    url: str
    name: str
    creds: Path | None = None
    inbox_prefix: str | None = None
    answer_s: float = 5.0

    @property
    def where(self) -> str:
        """The server's address for people, without scheme, user and password."""
        return self.url.rpartition("@")[2].rpartition("//")[2]

    @property
    def identity(self) -> Identity | None:
        """The identity from the credentials file; None without one: the URL may contain a user."""
        return None if self.creds is None else Identity(self.creds)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of nats-py's `connect`. `pending_size` 0: nothing is buffered during an outage.

        Raises BusRefused if the credentials cannot be read.
        """
        identity = self.identity
        callbacks = {} if identity is None else {"signature_cb": identity.sign, "user_jwt_cb": identity.token}
        return {
            **callbacks,
            "servers": self.url,
            "name": self.name,
            "inbox_prefix": self.inbox_prefix or (DEFAULT_PREFIX if identity is None else identity.inbox_prefix()),
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": _RECONNECT_S,
            "connect_timeout": 2,
            "ping_interval": _PING_S,
            "pending_size": 0,
        }

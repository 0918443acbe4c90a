"""NATS tokens (JWTs signed with ed25519 nkeys) and credentials files: serialization and parsing. Pure but for signing.

A credentials file holds a user's token and seed: until the token expires, any reader of the file can act as that user.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.bus_users import nkey
from marlaas_api.errors import Permanent

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_BLOCK = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s*\n\s*(\S+)\s*\n\s*-{3,}END \1-{3,}")


class CredentialsInvalid(Permanent):
    """The text is not a credentials file."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's token and seed, and the claims of the token.

    expires_at: unix seconds, None for never. inboxes: prefixes to which the user may subscribe.
    """

    token: str = field(repr=False)
    seed: str = field(repr=False)
    name: str
    expires_at: float | None
    inboxes: tuple[str, ...]


def signed(claims: Mapping[str, Any], seed: str) -> str:
    """Return the signed token of these claims; its issuer is the seed's public half. The same claims give the same token."""
    issued = {**claims, "iss": nkey.public_id(seed)}
    issued["jti"] = base64.b32encode(hashlib.sha256(_json(issued)).digest()).decode().rstrip("=")
    text = f"{_base64(_json(_HEADER))}.{_base64(_json(issued))}"
    return f"{text}.{_base64(nkey.sign(seed, text.encode()))}"


def claims_of(token: str) -> dict[str, Any]:
    """Return the claims of a token without verifying its signature. Raises CredentialsInvalid."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError, binascii.Error):
        raise CredentialsInvalid("its token cannot be decoded") from None
    if not isinstance(claims, dict):
        raise CredentialsInvalid("its token has no claims")
    return claims


def credentials_text(token: str, seed: str) -> str:
    """Return a credentials file in the format of all NATS clients."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def read_credentials(text: str) -> Credentials:
    """Parse a credentials file. Raises CredentialsInvalid, whose text shows no secret."""
    blocks = dict(_BLOCK.findall(text))
    token, seed = blocks.get("NATS USER JWT"), blocks.get("USER NKEY SEED")
    if token is None or seed is None:
        raise CredentialsInvalid("it is not a NATS credentials file: it contains no user token and seed")
    claims = claims_of(token)
    allowed = ((claims.get("nats") or {}).get("sub") or {}).get("allow") or []
    inboxes = tuple(subject.removesuffix(".>") for subject in allowed if subject.startswith("_INBOX"))
    expires_at = claims.get("exp")
    return Credentials(token, seed, str(claims.get("name", "")), float(expires_at) if expires_at else None, inboxes)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")

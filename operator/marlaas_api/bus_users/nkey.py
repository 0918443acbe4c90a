"""NATS keys; the only module that imports `nkeys`. A seed is secret text that begins with S; an id is its public half.

Ids of accounts need no seed: the signing key of an account signs its users, and nothing is signed as the account
itself. The ids are therefore constants. A store of streams, which NATS keeps under the account's id, stays valid when
keys are replaced.
"""

import base64
import hashlib
import hmac
import os
from enum import IntEnum

import nkeys

from marlaas_api.errors import Permanent

SEED_BYTES = 32


class KeyInvalid(Permanent):
    """The text is not a NATS seed of the required kind."""


class KeyKind(IntEnum):
    """The kind of a key; the number determines the first letter of its id (O, A, U)."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


def new_seed(kind: KeyKind) -> str:
    """Generate a random seed."""
    return seed_of(kind, os.urandom(SEED_BYTES))


def derived_seed(kind: KeyKind, secret: str, identity: str) -> str:
    """Derive the seed of an identity; deterministic, and not computable without `secret`."""
    return seed_of(kind, hmac.new(secret.encode(), identity.encode(), hashlib.sha256).digest())


def seed_of(kind: KeyKind, random: bytes) -> str:
    """Encode 32 bytes as a seed."""
    return bytes(nkeys.encode_seed(random, int(kind))).decode()


def public_id(seed: str) -> str:
    """Return the public half of a seed. Raises KeyInvalid."""
    return bytes(_pair(seed).public_key).decode()


def sign(seed: str, data: bytes) -> bytes:
    """Return an ed25519 signature. Raises KeyInvalid."""
    return bytes(_pair(seed).sign(data))


def checked_seed(kind: KeyKind, seed: str) -> str:
    """Return the seed if it is of this kind. Raises KeyInvalid, whose text does not show the seed."""
    expected = seed_of(kind, bytes(SEED_BYTES))[:2]
    if not seed.startswith(expected):
        raise KeyInvalid(f"not a NATS {kind.name.lower()} seed: it must begin with {expected}")
    _pair(seed)
    return seed


def account_id(name: str) -> str:
    """Return a constant account id, derived from the account's name; no seed for it is known."""
    raw = bytearray([KeyKind.ACCOUNT]) + hashlib.sha256(f"marlaas.dev account {name}".encode()).digest()
    raw += int(nkeys.crc16(raw)).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def _pair(seed: str) -> nkeys.KeyPair:
    try:
        return nkeys.from_seed(seed.encode())
    except Exception as error:
        raise KeyInvalid(f"not a NATS seed ({type(error).__name__})") from None

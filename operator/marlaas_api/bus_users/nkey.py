"""NATS keys: the only module that imports `nkeys` to make any. A seed is secret text that begins with S, an id is its public half.

Ids of accounts need no seed: an account's users are signed by its signing key, and nobody ever has to sign as the account itself. So
they are constants, and a store of streams (which NATS keeps under the account's id) outlives every key.
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
    """Text that is no NATS seed of the kind that is needed."""


class KeyKind(IntEnum):
    """What a key is for; the number is what its text begins with (O, A, U)."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


def new_seed(kind: KeyKind) -> str:
    """A seed that nobody else has."""
    return seed_of(kind, os.urandom(SEED_BYTES))


def derived_seed(kind: KeyKind, secret: str, identity: str) -> str:
    """The seed that belongs to an identity, the same every time; who does not know `secret` cannot tell it."""
    return seed_of(kind, hmac.new(secret.encode(), identity.encode(), hashlib.sha256).digest())


def seed_of(kind: KeyKind, random: bytes) -> str:
    """32 bytes as a seed."""
    return bytes(nkeys.encode_seed(random, int(kind))).decode()


def public_id(seed: str) -> str:
    """The public half. Raises KeyInvalid."""
    return bytes(_pair(seed).public_key).decode()


def sign(seed: str, data: bytes) -> bytes:
    """An ed25519 signature. Raises KeyInvalid."""
    return bytes(_pair(seed).sign(data))


def checked_seed(kind: KeyKind, seed: str) -> str:
    """The seed, if it is one of this kind. Raises KeyInvalid; its text does not show the seed."""
    expected = seed_of(kind, bytes(SEED_BYTES))[:2]
    if not seed.startswith(expected):
        raise KeyInvalid(f"not a NATS seed of an {kind.name.lower()}: it has to begin with {expected}")
    _pair(seed)
    return seed


def account_id(name: str) -> str:
    """A constant account id, from its name: the right form, and nobody knows a seed for it."""
    raw = bytearray([KeyKind.ACCOUNT]) + hashlib.sha256(f"marlaas.dev account {name}".encode()).digest()
    raw += int(nkeys.crc16(raw)).to_bytes(2, "little")
    return base64.b32encode(raw).decode().rstrip("=")


def _pair(seed: str) -> nkeys.KeyPair:
    try:
        return nkeys.from_seed(seed.encode())
    except Exception as error:
        raise KeyInvalid(f"not a NATS seed ({type(error).__name__})") from None

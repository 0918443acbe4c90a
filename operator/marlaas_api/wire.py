"""Messages to bytes and back: msgpack with a tag and a schema version, and claim-check for what is too large for the bus.

A worker refuses a message newer than it knows and reads the previous version. A payload above the bus's limit is
put into the blob store, and what travels is its reference (claim-check).
"""

from typing import Any, TypeVar

import ormsgpack
from pydantic import ValidationError

from marlaas_api import messages
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.errors import Permanent, UnsupportedSchema
from marlaas_api.messages import JobMessage, Message
from marlaas_api.names import job_prefix

SCHEMA_VERSION = 1
OLDEST_READABLE = 1

M = TypeVar("M", bound=Message)
_TYPES: dict[str, type[Message]] = {
    name: value for name, value in vars(messages).items() if isinstance(value, type) and issubclass(value, Message)
}


class BadMessage(Permanent):
    """Bytes that are no message of ours; the text says which field."""


def encode(message: Message) -> bytes:
    """Message to bytes."""
    body = message.model_dump(mode="python", exclude_defaults=True)
    return ormsgpack.packb(
        {"v": SCHEMA_VERSION, "t": type(message).__name__, "d": body}, option=ormsgpack.OPT_NON_STR_KEYS
    )


def decode(data: bytes) -> Message:
    """Bytes to whatever message they are. Raises UnsupportedSchema, BadMessage."""
    envelope = _envelope(data)
    kind = _TYPES.get(str(envelope.get("t")))
    if kind is None:
        raise BadMessage(f"unknown message type {envelope.get('t')!r}")
    try:
        return kind.model_validate(envelope["d"])
    except ValidationError as error:
        raise BadMessage(f"{kind.__name__}: {error}") from error


def decode_as(kind: type[M], data: bytes) -> M:
    """Bytes to a message of this kind. Raises UnsupportedSchema, BadMessage (also for another kind)."""
    message = decode(data)
    if not isinstance(message, kind):
        raise BadMessage(f"expected {kind.__name__}, found {type(message).__name__}")
    return message


def _envelope(data: bytes) -> dict[str, Any]:
    try:
        envelope = ormsgpack.unpackb(data)
        version = int(envelope["v"])
    except (ormsgpack.MsgpackDecodeError, KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"not a MARLaaS message: {error}") from error
    if not OLDEST_READABLE <= version <= SCHEMA_VERSION:
        raise UnsupportedSchema(
            f"message has schema version {version}; this worker reads {OLDEST_READABLE} to {SCHEMA_VERSION}: upgrade it"
        )
    return dict(envelope)


async def pack(message: JobMessage, blobs: Blobs, limit_bytes: int) -> bytes:
    """Encode; above the limit, store the bytes as a claim of the job and encode its reference instead."""
    data = encode(message)
    if len(data) <= limit_bytes:
        return data
    ref = await blobs.put(f"{job_prefix(message.ref)}/claims", "message", data)
    return ormsgpack.packb({"v": SCHEMA_VERSION, "t": "Claim", "d": ref.model_dump()})


async def unpack(data: bytes, blobs: Blobs) -> Message:
    """Decode, following a claim if the bytes are one. Raises as `decode` and as `Blobs.get`."""
    envelope = _envelope(data)
    if envelope.get("t") != "Claim":
        return decode(data)
    return decode(await blobs.get(BlobRef.model_validate(envelope["d"])))

"""Serialization of messages: msgpack with a type tag and a schema version, and claim-check for large payloads.

A worker refuses messages newer than its own schema version and reads the previous version. A new field needs no new
schema version: readers ignore fields that they do not know. A payload above the bus's limit is stored as a blob, and the
message carries the blob's reference (claim-check).

Token ids and logprobs travel as little-endian int32 and float32 bytes, four bytes per token: smaller than lists, and hashable. A float32
logprob survives the round trip bit for bit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import ormsgpack
from pydantic import BaseModel, ValidationError

from marlaas_api import messages
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.errors import Unreadable, UnsupportedSchema
from marlaas_api.messages import BusMessage, JobMessage
from marlaas_api.names import job_prefix

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# numpy is imported by the functions that need it: it is a fifth of the imports of a sandbox, which packs no ids.


def pack_ids(ids: Iterable[int]) -> bytes:
    """Serialize token ids [T]."""
    import numpy as np

    return np.fromiter(ids, dtype=np.int32).astype("<i4").tobytes()


def unpack_ids(data: bytes) -> "npt.NDArray[np.int32]":
    """Deserialize token ids [T]."""
    import numpy as np

    return np.frombuffer(data, dtype="<i4")


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Serialize logprobs [T]; they are rounded to float32."""
    import numpy as np

    return np.fromiter(logprobs, dtype=np.float64).astype("<f4").tobytes()


def unpack_logprobs(data: bytes) -> "npt.NDArray[np.float32]":
    """Deserialize logprobs [T]."""
    import numpy as np

    return np.frombuffer(data, dtype="<f4")


SCHEMA_VERSION = 1
OLDEST_READABLE = 1

M = TypeVar("M", bound=BusMessage)
B = TypeVar("B", bound=BaseModel)
_CLAIM = "Claim"
# Limit of untrusted text in an error that is logged.
_MOST_CHARACTERS = 500
_TYPES: dict[str, type[BusMessage]] = {
    name: value for name, value in vars(messages).items() if isinstance(value, type) and issubclass(value, BusMessage)
}


class BadMessage(Unreadable):
    """The bytes are not a valid message; the text gives the field."""


def encode(message: BusMessage) -> bytes:
    """Serialize a message."""
    body = message.model_dump(mode="python", exclude_defaults=True)
    return ormsgpack.packb(
        {"v": SCHEMA_VERSION, "t": type(message).__name__, "d": body}, option=ormsgpack.OPT_NON_STR_KEYS
    )


def decode(data: bytes, where: str = "") -> BusMessage:
    """Deserialize a message of any type. where: as in `decode_as`. Raises UnsupportedSchema, BadMessage."""
    with _named(where):
        return _decoded(*_opened(data))


def decode_as(kind: type[M], data: bytes, where: str = "") -> M:
    """Deserialize a message of this type. Raises UnsupportedSchema, BadMessage (also for another type).

    Args:
        where: its key, subject or blob, for the error.
    """
    with _named(where):
        tag, body = _opened(data)
        if tag != kind.__name__:
            raise BadMessage(f"expected {kind.__name__}, found {tag[:_MOST_CHARACTERS]!r}")
        return _validated(kind, body)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Begin the text of an error with the place of the message."""
    try:
        yield
    except Unreadable as error:
        raise (type(error)(f"{where} cannot be read: {error}") if where else error) from error.__cause__


def _opened(data: bytes) -> tuple[str, object]:
    """Return type tag and body of untrusted bytes. Raises UnsupportedSchema, BadMessage."""
    try:
        envelope = ormsgpack.unpackb(data)
        version = int(envelope["v"])
    except (ormsgpack.MsgpackDecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"not a MARLaaS message: {error}") from error
    if not OLDEST_READABLE <= version <= SCHEMA_VERSION:
        raise UnsupportedSchema(
            f"message has schema version {version}; this worker reads {OLDEST_READABLE} to {SCHEMA_VERSION}: upgrade it"
        )
    return str(envelope.get("t")), envelope.get("d")


def _decoded(tag: str, body: object) -> BusMessage:
    kind = _TYPES.get(tag)
    if kind is None:
        raise BadMessage(f"unknown message type {tag[:_MOST_CHARACTERS]!r}")
    return _validated(kind, body)


def _validated(kind: type[B], body: object) -> B:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise BadMessage(f"{kind.__name__}: {str(error)[:_MOST_CHARACTERS]}") from error


async def pack(message: JobMessage, blobs: Blobs, limit_bytes: int) -> bytes:
    """Serialize a message; above the limit, store the bytes in the job's claims folder and serialize their reference."""
    data = encode(message)
    if len(data) <= limit_bytes:
        return data
    ref = await blobs.put(f"{job_prefix(message.ref)}/claims", "message", data)
    return ormsgpack.packb({"v": SCHEMA_VERSION, "t": _CLAIM, "d": ref.model_dump()})


async def unpack(data: bytes, blobs: Blobs, where: str = "") -> BusMessage:
    """Deserialize a message, and fetch it if the bytes are a claim. Raises as `decode` and as `Blobs.get`."""
    with _named(where):
        tag, body = _opened(data)
        if tag != _CLAIM:
            return _decoded(tag, body)
        ref = _validated(BlobRef, body)
    return decode(await blobs.get(ref), ref.name)

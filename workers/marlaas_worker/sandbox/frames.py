"""Frames between the supervisor and a child: JSON with a four-byte length, of limited size.

Standard library only, because every child imports this module.
"""

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(Exception):
    """A malformed frame, or one that is too long."""


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame. Raises BadFrame when it is too long."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {len(body)} bytes; a turn or a score may have {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for a frame. Raises EOFError when the other side has closed the socket."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(channel, length))
    return message


async def read(reader: asyncio.StreamReader) -> bytes:
    """Wait for a frame and return its body, not yet validated. Raises BadFrame, asyncio.IncompleteReadError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"the length {length} where a message should begin")
    return await reader.readexactly(length)


def _exactly(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = channel.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the supervisor is gone")
        data += part
    return bytes(data)

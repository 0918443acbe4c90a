"""How the supervisor and a child talk: frames of JSON with a four-byte length, bounded.

Standard library only: this is imported into every child.
"""

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(Exception):
    """What came is no frame of ours, or is too long."""


def encode(message: dict[str, Any]) -> bytes:
    """Message to frame. Raises BadFrame when it is too long."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {len(body)} bytes; a turn or a score may have {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for a frame. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(channel, length))
    return message


async def read(reader: asyncio.StreamReader) -> bytes:
    """Wait for a frame and return its body, which nobody has checked yet. Raises BadFrame, asyncio.IncompleteReadError."""
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

"""Connection between a child and its supervisor: frames on a socket pair, and the child's end of it.

A frame is a four-byte length and a JSON message of at most `MAX_FRAME_BYTES`. This module imports neither pydantic nor asyncio
nor the bus: every child has it in memory. The supervisor validates messages with `ledger.parse`.
"""

import json
import socket
import struct
from _thread import LockType, allocate_lock  # without `threading`, a fork copies a hundred pages less
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from marlaas.chat_messages import encodable
from marlaas.environment import Message, Reply, StopReason, ToolCall, TurnLimit
from marlaas.environment_types import ReplyParts, TurnRequest

if TYPE_CHECKING:
    import asyncio

MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(Exception):
    """A malformed frame, or one that is too long."""


class SupervisorChannel:
    """`Channel` of a child process (`marlaas.environment_types`): requests each turn from the supervisor. Several threads may call it.

    connection: socket to the supervisor; the caller closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = allocate_lock()  # an environment's threads send too
        self._state = allocate_lock()
        self._is_read = False
        self._answers: dict[tuple[str, int], dict[str, Any]] = {}
        self._waiting: dict[tuple[str, int], LockType] = {}

    def turn(self, request: TurnRequest) -> Reply:
        """Request a turn from the supervisor, and wait for the reply. Raises TurnLimit if the supervisor grants no turn."""
        given = {} if request.demonstration is None else {"demonstration": _plain(request.demonstration)}
        self._send(
            kind="turn",
            agent=request.agent,
            number=request.number,
            num_before=request.num_before,
            choice=request.choice,
            parent=request.parent,
            append=request.append if isinstance(request.append, str) else [_plain(m) for m in request.append],
            max_tokens=request.max_tokens,
            tools=request.tools,
            stop=request.stop,
            **given,
        )
        answer = self._receive((request.agent, request.number))
        if answer["kind"] == "limit":
            raise TurnLimit(answer["text"])
        stop = StopReason(answer["stop_reason"])
        sizes = (answer["num_tokens"], answer["turn"], answer["num_prompt_tokens"])
        return Reply(answer["text"], stop, *sizes, opening=answer["opening"], parts=_parts(answer.get("parts")))

    def _receive(self, turn: tuple[str, int]) -> dict[str, Any]:
        """Wait for the supervisor's answer to a turn. If several threads wait, one of them reads the answers for all.

        turn: name of the agent, and number of the turn among the agent's own.
        """
        wake = allocate_lock()
        wake.acquire()
        with self._state:
            self._waiting[turn] = wake
        while True:
            with self._state:
                if turn in self._answers:
                    del self._waiting[turn]
                    return self._answers.pop(turn)
                is_reader, self._is_read = not self._is_read, True
            if is_reader:
                self._read(turn)
            else:
                wake.acquire()

    def _read(self, turn: tuple[str, int]) -> None:
        """Read one answer, in the thread that waits for `turn`.

        If the answer is for another thread, wake that thread. If it is for this thread, or the connection fails, wake a waiting thread
        to read next.
        """
        answer: dict[str, Any] | None = None
        try:
            answer = receive_frame(self._connection)
        finally:
            with self._state:
                self._is_read = False
                owner = turn if answer is None else (answer["agent"], answer["turn"])
                if answer is None:
                    del self._waiting[turn]
                else:
                    self._answers[owner] = answer
                others = (name for name in self._waiting if name != turn and name not in self._answers)
                woken = owner if owner != turn else next(others, None)
                if woken in self._waiting and self._waiting[woken].locked():
                    self._waiting[woken].release()

    def may_call(self, agents: Sequence[str]) -> None:
        """Report to the supervisor the names of the agents that the task may call."""
        self._send(kind="agents", agents=list(agents))

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Report the start or end of a tool call to the supervisor, so that a crash during the call can be attributed to the policy.

        Args:
            is_open: True at the start of the call, False at its end.
            rewards: each agent's reward so far, by name.
        """
        self._send(kind="tool", is_open=is_open, rewards=dict(rewards))

    def _send(self, **message: Any) -> None:
        frame = encode_frame(message)
        with self._sending:
            self._connection.sendall(frame)


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame. Raises BadFrame when it is too long."""
    body = encodable(json.dumps(message, ensure_ascii=False, separators=(",", ":"))).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {len(body)} bytes; a turn or a score has at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive_frame(connection: socket.socket) -> dict[str, Any]:
    """Wait for a frame, in a child. Raises EOFError when the supervisor has closed the connection."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: dict[str, Any] = json.loads(_exactly(connection, length))
    return message


async def read_frame(reader: "asyncio.StreamReader") -> bytes:
    """Wait for a frame, in the supervisor, and return its body unparsed. Raises BadFrame, asyncio.IncompleteReadError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return await reader.readexactly(length)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError("the supervisor closed the connection")
        data += part
    return bytes(data)


def _parts(given: dict[str, Any] | None) -> ReplyParts | None:
    if given is None:
        return None
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in given["tool_calls"])
    return ReplyParts(given["reasoning"], given["content"], calls, given["raw"])


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content, "name": message.name}
    if message.tool_calls:
        plain["tool_calls"] = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    return plain
